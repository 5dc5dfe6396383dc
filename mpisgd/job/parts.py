"""Parts of a job from its configuration, alike for a real rank, a virtual cluster and a replay.

An object in `UserObjects` replaces a configured part.
"""

from __future__ import annotations

import functools
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd import data as datasets
from mpisgd import models
from mpisgd.base import terminal
from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError, in_words
from mpisgd.base.imports import load_attribute
from mpisgd.base.streams import Domain
from mpisgd.config import Config, TrustRatioOptions, hints, replace
from mpisgd.data import DataSet, Split, sampling
from mpisgd.data.sampling import Sampling, StreamSampling
from mpisgd.gradient.gradient import Gradient, not_the_models, pair
from mpisgd.gradient.measure import ERROR, Measure
from mpisgd.gradient.objective import Loss, Objective, OwnStep, described, function_of, scalar
from mpisgd.models.in_pieces import InPieces, Needed
from mpisgd.models.partitioned import Partitioned
from mpisgd.protocols import Protocol, SandblasterOptions
from mpisgd.records import initial
from mpisgd.records.callbacks import NO_CALLBACKS, Callbacks
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Directory
from mpisgd.update import groups
from mpisgd.update.groups import Segment
from mpisgd.vectors import nest
from mpisgd.vectors.cut import Stages, are_children, check_names, cut_between_pieces, stages_from
from mpisgd.vectors.flat import FlatModel, Layer, cut_by_layers, in_channels_last, named, slice_bounds, unchanged
from mpisgd.vectors.kept_state import state_kept
from mpisgd.vectors.split import Traced, split


@dataclass(frozen=True)
class UserObjects:
    model: Callable[[], nn.Module] | None = None
    loss: Loss | None = None
    data: Any = None
    step: Callable[[nn.Module, Any], Any] | None = None
    callbacks: Callbacks = NO_CALLBACKS


NO_OBJECTS = UserObjects()
UNNAMED = "custom"
"""Stands for a loss or step without an importable name."""


@dataclass(frozen=True)
class Meta:
    """Facts about the data, for ranks without data."""

    train_samples: int
    test_samples: int
    input_shape: tuple[int, ...]
    classes: int | None
    """None if only reading all samples could tell."""
    example: Any = None


def load_data(config: Config, user_objects: UserObjects) -> DataSet:
    nested = bool(user_objects.step is not None or config.step)
    reading = datasets.Reading(config.seed, config.mu, config.epoch_samples) if config.sampling == "stream" else None
    with seeded(seeds_of(Domain.DATA, config.seed)), _staying("data"):  # each rank calls the factory
        if user_objects.data is not None:
            offered = {"data_dir": config.data_dir, "seed": config.seed}
            data = datasets.as_dataset(user_objects.data, "data", offered, nested=nested, reading=reading)
        else:
            data = datasets.load(config.data, data_dir=config.data_dir, seed=config.seed, nested=nested, reading=reading)
    if len(data.train) == 0:
        raise ConfigError(f"data {data.name}: 0 training samples, expected at least 1")
    if reading is not None and not data.train.in_order:
        raise ConfigError(f"sampling = 'stream': data {data.name} is none, expected an IterableDataset, or another sampling")
    datasets.check_batch_size(data.train, config.mu)
    return datasets.set_aside(data, config.data.validation, config.seed) if config.data.validation else data


def meta_of(data: DataSet, config: Config | None = None) -> Meta:
    """Return the facts; `config`: of a job with a model to trace."""
    example = None if config is None or not (config.in_groups and config.stages.at) else first_micro_batch(config, data)[0]
    return Meta(len(data.train), len(data.test), data.input_shape, data.classes, example)


def first_micro_batch(config: Config, data: DataSet) -> tuple[Any, Any]:
    with seeded(seeds_of(Domain.ALIKE, config.seed)):
        batch = pair(data.train.batch(np.arange(config.mu // config.micro_batches)))
    data.train.forget()
    return batch


def load_loss(config: Config, user_objects: UserObjects) -> Objective:
    """Return the loss, or the user's step. Raises ConfigError for none or both."""
    if user_objects.step is not None or config.step:
        if user_objects.loss is not None:
            raise ConfigError("step and loss are both given: expected only one; a step computes the loss itself")
        function = user_objects.step if user_objects.step is not None else load_attribute(config.step, "step")
        return OwnStep(_callable(function, "step", "(model, batch)"))
    if user_objects.loss is not None:
        loss: Loss = _callable(user_objects.loss, "loss", "(output, target)")
        return loss
    name = config.loss
    if ":" in name:
        loss = _callable(load_attribute(name, "loss"), "loss", "(output, target)")
        return loss
    try:
        builtin: Loss = getattr(torch.nn.functional, name)
    except AttributeError as error:
        snake = hints.loss(name)
        mean = f"; did you mean {snake!r}?" if hasattr(torch.nn.functional, snake) and snake else ""
        expected = f"expected a function of torch.nn.functional, or package.module:callable{mean}"
        raise ConfigError(f"loss = {name!r}: {expected}") from error
    return builtin


def _callable(given: Any, field: str, arguments: str) -> Any:
    """Return a user's function. Raises ConfigError for anything else, or parameters that nobody would train."""
    if isinstance(given, type):
        raise ConfigError(f"{field}: found the class {given.__name__}, expected a callable of {arguments}: {given.__name__}()")
    if not callable(given):
        raise ConfigError(f"{field}: found {described(given)}, expected a callable of {arguments}")
    trainable = [name for name, each in given.named_parameters() if each.requires_grad] if isinstance(given, nn.Module) else []
    if trainable:
        raise ConfigError(f"{field}: {type(given).__name__} has {not_the_models(trainable)}")
    return given


def build_model(
    config: Config,
    meta: Meta,
    user_objects: UserObjects,
    device: str = "cpu",
    *,
    resumed: bool = False,
    needed: Needed | None = None,
    rules: int = schema.RULES,
) -> FlatModel:
    """Build the network with its initial weights. Raises ConfigError for a misfit.

    `resumed`: a checkpoint follows; `init_from` is read only for frozen weights and buffers, which checkpoints lack. Raises
    DataError if the file is gone or changed.
    """
    module = make_module(config, meta, user_objects, needed).train()
    if rules < 6:
        for each in module.parameters():
            each.data = each.data.contiguous()
    if config.init_from and resumed and initial.holds_more(module):
        initial.load(module, replace(config, init_from=str(initial.same(Directory(config.out)))))
    elif config.init_from and not resumed:
        initial.load(module, config)
    return FlatModel(module, config.memory_format, device, config.autocast, _traced(config, meta, module))


def make_module(config: Config, meta: Meta, user_objects: UserObjects, needed: Needed | None = None) -> nn.Module:
    named: dict[str, Any] = {"input_shape": meta.input_shape, "classes": meta.classes, "seed": config.seed, "needed": needed}
    named["places"] = config.group_size if config.partitioned else 1
    with _staying("model"):
        if user_objects.model is not None:
            return models.from_factory(user_objects.model, **named)
        return models.make(config.model, **named)


def warn_at_start(config: Config, data: DataSet) -> None:
    if data.train.advice:
        terminal.warn(data.train.advice)
    if config.decays_unweighted:
        terminal.warn(
            "mpisgd: warning: staleness weights gradients, and not weight decay: relative to the gradients, decay is about as many"
            " times as strong as these are stale; expected modulate = 'rate', which weights both, or decay in the loss"
            " (docs/howto/learning-rate.md)"
        )


@contextmanager
def _staying(what: str) -> Iterator[None]:
    """Undo a factory's change of directory, with a warning: relative paths would lead elsewhere."""
    before = Path.cwd()
    try:
        yield
    finally:
        if (now := Path.cwd()) != before:
            os.chdir(before)
            terminal.warn(
                f"mpisgd: warning: {what}: the factory changed the current directory to {now}; mpisgd went back to {before}, where"
                " out and other paths of the job lie: expected absolute paths in the factory's object"
            )


def _traced(config: Config, meta: Meta, module: nn.Module) -> Traced | None:
    """Trace a model that only torch's splitter can cut. Raises ConfigError."""
    begin = config.stages.at
    if not (config.in_groups and begin) or isinstance(module, InPieces) or are_children(module, begin):
        return None
    check_names(begin, config.group_size)
    example = meta.example
    if config.memory_format == "channels_last":  # the model's format
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = nest.mapped(example, in_channels_last)
    return split(module, begin, example)


def stages_of(config: Config, model: FlatModel) -> Stages | None:
    """Return the model's stages, if cut. Raises ConfigError."""
    if isinstance(model.module, Partitioned):
        return cut_between_pieces(model.module, config.shards)
    return stages_from(model, config.group_size, config.shards, config.stages.at) if config.in_groups else None


def bounds(config: Config, model: FlatModel, rules: int = schema.RULES) -> list[tuple[int, int]]:
    """Return each shard's slice. Raises ConfigError for too many shards."""
    if (stages := stages_of(config, model)) is not None:
        return stages.slices
    if config.per_layer:  # whole layers, where norms are of slices
        return cut_by_layers(model.layers, config.shards, within=rules > 2 and not config.norms_of_slices)
    return slice_bounds(model.size, config.shards, config.slices)


def segments_of(config: Config, model: FlatModel) -> list[Segment]:
    """Return the parameter groups. Raises ConfigError if a group matches nothing."""
    sizes = {name: view.numel() for name, view in model.views(model.weights).items()}
    optimizer = config.inner_optimizer if config.local_steps else config.optimizer
    return groups.segments_of(config.groups, sizes, isinstance(optimizer, TrustRatioOptions))


def facts_of_model(config: Config, layers: Sequence[Layer], slices: Sequence[tuple[int, int]], policy: str) -> dict[str, Any]:
    names = {"layers": named(layers, slices)} if config.per_layer else {}
    parameters = slices[-1][1]
    return {"parameters": parameters, "parameter_nbytes": 4 * parameters, "batch_norm_policy": policy, **names}


def make_sampling(config: Config, meta: Meta, ranks: int) -> Sampling:
    if isinstance(config.protocol, SandblasterOptions):
        return sampling.PortionSampling(meta.train_samples, config.mu, config.protocol.share, config.seed)
    if config.sampling == "dealt":
        return sampling.DealtSampling(meta.train_samples, config.mu, ranks, config.seed, count=config.mini_batches_per_push)
    return sampling.make(config.sampling, size=meta.train_samples, mu=config.mu, lambda_=ranks, seed=config.seed)


def gradients_per_update(protocol: Protocol, lambda_: int, ranks: int) -> float:
    return protocol.gradients_per_update * ranks / lambda_


def run_samples(config: Config, train_samples: int) -> int:
    return math.ceil(config.epochs * train_samples)


def check_stream(config: Config, train: Split, dealing: Sampling, number: int) -> None:
    """Check a stream's mini-batches: learners 0 and 1 must differ. Raises ConfigError, DataError."""
    if not isinstance(dealing, StreamSampling):
        return
    batches = {
        each: datasets.fetch(train, dealing.indices(each, 0), functools.partial(seeds_of, Domain.SAMPLES, config.seed, each))
        for each in sorted({number, *range(min(2, dealing.lambda_))})
    }
    one, *others = (nest.tensors_of(batches[each]) for each in range(min(2, dealing.lambda_)))
    if others and one.keys() == others[0].keys() and all(torch.equal(one[name], others[0][name]) for name in one):
        raise ConfigError(
            "data: learners 0 and 1 would read the same samples of the stream: expected an __iter__ that gives each learner other"
            " samples, by torch.utils.data.get_worker_info(): `id` is the learner's, `num_workers` the number of learners"
        )
    train.forget()


def make_measure(config: Config, model: FlatModel, loss: Objective, data: DataSet) -> Measure:
    options = config.evaluation
    return Measure(
        model,
        loss,
        data=data,
        batch=options.batch,
        buffers=config.buffers_evaluated,
        recalibrate_batches=options.recalibrate_batches,
        seed=config.seed,
    )


WRONG = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, StopIteration)
"""Errors of torch for misfitting shapes and types."""


def check_first_batch(config: Config, meta: Meta, model: FlatModel, gradient: Gradient, *, twice: bool = False) -> float:
    """Return the loss of the first mini-batch, which must be finite and fit the model.

    `twice`: compute again, and warn of another loss. Raises ConfigError; DataError where samples differ. Errors of the user's data
    set go through.
    """
    gradient.prepare(0)
    own = isinstance(gradient.objective, OwnStep)
    compute: Callable[[], Tensor] = (
        functools.partial(_of_step, gradient) if own else functools.partial(_of_loss, config, meta, gradient)
    )
    with state_kept(model.module, function_of(gradient.objective)) as (state, hidden), unchanged(model), model.untouched():
        loss = _finite(compute(), "step: the loss" if own else "loss")
        if twice:
            model.take_gradients_back()
            state.put_back()
            again = compute().item()
            if again != loss:
                terminal.warn(_NOT_KEPT.format(loss, again, _by_what(hidden.changed)))
    model.take_gradients_back()
    return loss


_NOT_KEPT = (
    "mpisgd: warning: the first mini-batch has the loss {!r}, and {!r} when computed again from the same weights and buffers:"
    " {}. Virtual learners share this state, and a continued run, or a replay, begins without: expected the state in a buffer of"
    " the model, or in get_extra_state"
)


def _by_what(changed: Sequence[str]) -> str:
    if not changed:
        return "the model, the loss or the step keeps state elsewhere, or draws from a generator of its own"
    return f"the loss depends on {', '.join(changed[:3])}, kept by Python and by no checkpoint"


def _of_loss(config: Config, meta: Meta, gradient: Gradient) -> Tensor:
    inputs = f"the first mini-batch, inputs of shape {(config.mu, *meta.input_shape)}"
    with torch.no_grad():
        try:
            output, targets = gradient.output(0)
        except WRONG as error:
            raise failing_model(inputs, error) from error
        try:
            loss: Any = gradient.loss_of(output, targets)
        except (*WRONG, AttributeError) as error:
            raise failing_loss(inputs, output, targets, error) from error
    return scalar(loss, "loss")


def _of_step(gradient: Gradient) -> Tensor:
    with _saying_where(function_of(gradient.objective), "the first mini-batch"):
        loss = gradient.step(0)
    gradient.check(loss)
    return loss


def check_metrics(config: Config, model: FlatModel, loss: Objective, data: DataSet) -> tuple[str, ...]:
    """Evaluate a first batch; return the names of the step's metrics.

    Raises as `check_first_batch`, and for best weights by an unknown metric.
    """
    measure = make_measure(config, model, loss, data)
    with state_kept(model.module, function_of(loss)):
        function, who = (loss.function, "step") if isinstance(loss, OwnStep) else (loss, "loss or model")
        found = measure.names(config.mu, lambda: _saying_where(function, "the first batch of an evaluation", who))
    _check_best(config, found, data)
    names = tuple(name for name in found if name not in ("loss", ERROR))
    for name in names:
        if name in (schema.EVALUATIONS.names or ()):
            raise ConfigError(f"step: its metric {name!r} has the name of a column of the log, expected another")
    return names


def _check_best(config: Config, found: tuple[str, ...], data: DataSet) -> None:
    best, (part, name) = config.evaluation.best, config.evaluation.judged
    if best and name not in found:
        raise ConfigError(f"evaluation.best = {best!r}: expected a metric of this job's evaluations: {', '.join(found)}")
    if best and not len(data.part(part)):
        raise ConfigError(f"evaluation.best = {best!r}: expected '' for data without {part!s} samples")


@contextmanager
def _saying_where(function: Any, what: str, who: str = "step") -> Iterator[None]:
    """Raise ConfigError with the failing line of the user's function."""
    try:
        yield
    except (*WRONG, AttributeError, LookupError, ArithmeticError) as error:
        own = getattr(getattr(function, "__code__", None), "co_filename", "")
        lines = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == own]
        where = f", at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
        raise ConfigError(f"the {who} fails at {what}{where}: {in_words(error)}") from error


def _finite(loss: Tensor, who: str) -> float:
    if not math.isfinite(loss.item()):
        raise ConfigError(f"{who} = {loss.item()} at the first mini-batch: expected a finite number; check data and model")
    return loss.item()


def failing_model(inputs: str, error: Exception) -> ConfigError:
    return ConfigError(f"the model fails at {inputs}: {in_words(error)}")


def failing_loss(inputs: str, output: Any, targets: Any, error: Exception) -> ConfigError:
    failed = in_words(error)
    if not isinstance(output, Tensor):
        expected = "expected a tensor, or a loss for this output"
        return ConfigError(f"model: returned {described(output)}, and the loss fails: {failed}: {expected}")
    kind = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else described(targets)
    what = f"output of shape {tuple(output.shape)}, targets {kind}"
    return ConfigError(f"the loss fails at {inputs}, {what}: {failed}{_expected_of_loss(output, targets, error)}")


def _expected_of_loss(output: Tensor, targets: Any, error: Exception) -> str:
    if isinstance(error, TypeError):
        return "; expected a callable of (output, target)"
    if not isinstance(targets, Tensor):
        return ""
    classes = int(targets.max()) + 1 if targets.dtype == torch.int64 and targets.numel() else 0
    if isinstance(error, IndexError) and output.dim() > 1 and classes > output.shape[1]:
        return f"; the model has {output.shape[1]} outputs, the targets at least {classes} classes"
    return ""
