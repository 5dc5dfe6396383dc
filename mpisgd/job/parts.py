"""The parts of a job, made from its configuration: what a real rank, a virtual cluster and a replay build alike.

Nothing here knows ranks. Where `Brought` holds an object, it stands for what the configuration would name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd import data as datasets
from mpisgd import models
from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import load_attribute
from mpisgd.base.streams import Domain
from mpisgd.config import Config, hints
from mpisgd.data import DataSet, sampling
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.gradient import Gradient, Loss
from mpisgd.gradient.measure import Measure
from mpisgd.protocols import Protocol
from mpisgd.update import groups
from mpisgd.update.groups import Segment
from mpisgd.vectors.flat import FlatModel, Layer, bounds_of, cut_between, slice_bounds


@dataclass(frozen=True)
class Brought:
    """Parts that the user brings as Python objects, instead of by name in the configuration."""

    model: Callable[[], nn.Module] | None = None
    loss: Loss | None = None
    data: Any = None


NOTHING_BROUGHT = Brought()
UNNAMED_LOSS = "custom"
"""Stands in a configuration for a loss that was brought as an object, and has no name by which it can be imported."""


@dataclass(frozen=True)
class Meta:
    """Facts about the data for ranks that do not have it."""

    train_samples: int
    test_samples: int
    input_shape: tuple[int, ...]
    classes: int | None
    """None where only reading all samples could tell."""


def load_data(config: Config, brought: Brought) -> DataSet:
    """Raises ConfigError, DataError."""
    with seeded(seeds_of(Domain.DATA, config.seed)):  # every rank calls the factory by itself
        if brought.data is not None:
            data = datasets.as_dataset(brought.data, "data", {"data_dir": config.data_dir, "seed": config.seed})
        else:
            data = datasets.load(config.data, data_dir=config.data_dir, seed=config.seed)
    if len(data.train) == 0:
        raise ConfigError(f"data {data.name}: it has no training samples")
    return data


def meta_of(data: DataSet) -> Meta:
    return Meta(len(data.train), len(data.test), data.input_shape, data.classes)


def load_loss(config: Config, brought: Brought) -> Loss:
    """Raises ConfigError where there is no such function."""
    if brought.loss is not None:
        return brought.loss
    name = config.loss
    if ":" in name:
        loss: Loss = load_attribute(name, "loss")
        return loss
    try:
        builtin: Loss = getattr(torch.nn.functional, name)
    except AttributeError as error:
        snake = hints.loss(name)
        mean = f"; did you mean {snake!r}?" if hasattr(torch.nn.functional, snake) and snake else ""
        expected = f"expected a function of torch.nn.functional, or package.module:callable{mean}"
        raise ConfigError(f"loss = {name!r}: {expected}") from error
    return builtin


def build_model(config: Config, meta: Meta, brought: Brought, device: str = "cpu") -> FlatModel:
    """The network with its initial weights. Raises ConfigError where it does not fit the data."""
    if brought.model is not None:
        module = models.from_factory(brought.model, input_shape=meta.input_shape, classes=meta.classes, seed=config.seed)
    else:
        module = models.make(config.model, input_shape=meta.input_shape, classes=meta.classes, seed=config.seed)
    return FlatModel(module, config.memory_format, device)


def cut(config: Config, model: FlatModel) -> list[list[Layer]]:
    """The layers of each shard's slice; none are named where slices are cut evenly. Raises ConfigError for too many shards."""
    return cut_between(model.layers, config.shards) if config.exchange == "layerwise" else []


def bounds(config: Config, model: FlatModel) -> list[tuple[int, int]]:
    """The slice of each shard. Raises ConfigError for too many shards."""
    return bounds_of(cut(config, model)) or slice_bounds(model.size, config.shards)


def segments_of(config: Config, model: FlatModel) -> list[Segment]:
    """The groups of its parameters. Raises ConfigError where one matches nothing."""
    return groups.segments_of(config.groups, {name: view.numel() for name, view in model.views(model.weights).items()})


def facts_of_model(parameters: int, batch_norm_policy: str, slices: list[list[Layer]]) -> dict[str, Any]:
    """For a run's config.toml: sizes, and the names of each slice's layers, where slices are cut between layers."""
    layers = {"layers": [[layer.name or "(model)" for layer in layers] for layers in slices]} if slices else {}
    nbytes = 4 * parameters
    return {"parameters": parameters, "parameter_nbytes": nbytes, "batch_norm_policy": batch_norm_policy, **layers}


def make_sampling(config: Config, meta: Meta, ranks: int) -> Sampling:
    """Make the dealing of data to all ranks that compute: learners, or in teams."""
    return sampling.make(config.sampling, size=meta.train_samples, mu=config.mu, lambda_=ranks, seed=config.seed)


def gradients_per_update(protocol: Protocol, lambda_: int, ranks: int) -> float:
    """Number of gradients that normally make one update, where `ranks` compute for lambda_ learners; whole where all count."""
    return protocol.gradients_per_update * ranks / lambda_


def run_samples(config: Config, train_samples: int) -> int:
    """Number of samples that a run is meant to apply."""
    return math.ceil(config.epochs * train_samples)


def budget_samples(config: Config, protocol: Protocol, train_samples: int) -> float:
    """Applied samples at which a shard stops the run; infinite where learners leave by themselves."""
    return math.inf if protocol.exact else run_samples(config, train_samples)


def share_of(config: Config, protocol: Protocol, train_samples: int, lambda_: int, learner_id: int) -> float:
    """Mini-batches after which a learner leaves by itself: those that the epochs deal to it; infinite where a shard stops it."""
    mini_batches = math.ceil(run_samples(config, train_samples) / config.mu)
    return math.ceil((mini_batches - learner_id) / lambda_) if protocol.exact else math.inf


def make_measure(config: Config, model: FlatModel, loss: Loss, data: DataSet) -> Measure:
    options = config.evaluation
    return Measure(
        model,
        loss,
        train=data.train,
        test=data.test,
        batch=options.batch,
        buffers=options.buffers,
        recalibrate_batches=options.recalibrate_batches,
        seed=config.seed,
    )


_WRONG = (RuntimeError, ValueError, TypeError, IndexError)
"""Errors that torch raises for shapes and types that do not fit."""


def check_first_batch(config: Config, meta: Meta, model: FlatModel, gradient: Gradient) -> float:
    """The first mini-batch: its shapes must fit the model, and its loss be a finite scalar, which is returned.

    Raises ConfigError; DataError where samples differ. What the user's data set raises goes through.
    """
    gradient.prepare(0)
    state = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    inputs = f"the first mini-batch, inputs of shape {(config.mu, *meta.input_shape)}"
    with torch.no_grad():
        try:
            output, targets = gradient.output(0)
        except _WRONG as error:
            raise ConfigError(f"the model fails at {inputs}: {type(error).__name__}: {error}") from error
        try:
            loss: Any = gradient.loss_of(output, targets)
        except (*_WRONG, AttributeError) as error:
            failed = f"{type(error).__name__}: {error}"
            if not isinstance(output, Tensor):
                expected = "expected a tensor, or a loss that takes such an output"
                raise ConfigError(f"model: it returned {_described(output)}, and the loss fails: {failed}: {expected}") from error
            what = f"output of shape {tuple(output.shape)}, targets {targets.dtype} {tuple(targets.shape)}"
            raise ConfigError(f"the loss fails at {inputs}, {what}: {failed}{_expected_of_loss(output, targets, error)}") from error
    if not isinstance(loss, Tensor) or loss.is_complex():
        found = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else _described(loss)
        raise ConfigError(f"loss: it returned {found}, expected a scalar tensor that autograd can differentiate")
    if loss.numel() != 1:
        raise ConfigError(f"loss: expected a scalar, got shape {tuple(loss.shape)}")
    if not math.isfinite(loss.item()):
        raise ConfigError(f"loss = {loss.item()} at the first mini-batch: expected a finite number; check data and model")
    for name, buffer in model.module.named_buffers():
        buffer.copy_(state[name])
    return loss.item()


def _expected_of_loss(output: Tensor, targets: Tensor, error: Exception) -> str:
    """Say what is wanted, for the two most usual errors; "" for others."""
    if isinstance(error, TypeError):
        return "; expected a callable of (output, target)"
    classes = int(targets.max()) + 1 if targets.dtype == torch.int64 and targets.numel() else 0
    if isinstance(error, IndexError) and output.dim() > 1 and classes > output.shape[1]:
        return f"; the model has {output.shape[1]} outputs, its targets are of at least {classes} classes"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    return f"{type(value).__name__} {value!r}" if isinstance(value, int | float | str) else f"{type(value).__name__}"
