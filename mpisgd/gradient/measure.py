"""Loss and error of weights on a split of the data, and the policy for batch-norm statistics (DESIGN 5).

Buffers that are no parameters are never exchanged: a learner's running statistics describe its own weights and mini-batches,
not the snapshot's. `recalibrate` measures them anew, at the weights to be evaluated, as the plain mean over some training
mini-batches, drawn at random by the run's seed, on every rank and in every evaluation the same ones; `initial` leaves what the
model factory made, for models that do not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.draws import kept, seed_all, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import EvaluationOptions
from mpisgd.data import Split
from mpisgd.data.sampling import recalibration_batches
from mpisgd.gradient.gradient import moved, pair
from mpisgd.gradient.objective import Loss, Objective, OwnStep
from mpisgd.vectors.flat import FlatModel

ERROR = "error"
"""Name of the metric of an own step that stands in the place of the share of wrong classes."""

_TEST, _TRAIN, _RECALIBRATION = range(3)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The layers of a model whose running statistics the policy is about."""
    return [layer for layer in module.modules() if isinstance(layer, _BATCH_NORMS) and layer.track_running_stats]


def batch_norm_policy(module: nn.Module, options: EvaluationOptions, train_samples: int) -> str:
    """Describe how batch normalisation is treated in this model, for the report."""
    layers = len(batch_norms(module))
    if not layers:
        return "no batch-norm layers"
    samples = min(train_samples, options.batch * options.recalibrate_batches)
    on = f" on {samples:,} of {train_samples:,} training samples, drawn at random" if options.buffers == "recalibrate" else ""
    return f"{options.buffers}{on} ({layers} layer{'s' * (layers > 1)})"


def _drawn(split: Split, indices: np.ndarray, seed: int, purpose: int, number: int) -> Any:
    """Fetch these samples. What they draw, and the model after them, depends on the other names alone (law 5)."""
    seed_all(seeds_of(Domain.EVALUATION, seed, purpose, number))
    return split.batch(indices)


def recalibrate(model: FlatModel, loss: Objective, split: Split, *, batch: int, batches: int, seed: int) -> None:
    """Set batch-norm statistics to their plain mean over `recalibration_batches` of the training samples.

    An own step is called, which knows how batches go into the model.

    All other layers are as in an evaluation, for which the statistics are meant.
    """
    layers = batch_norms(model.module)
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
        layer.momentum = None  # type: ignore[assignment]
    model.module.eval()
    for layer in layers:
        layer.train()
    with torch.no_grad(), kept():
        chosen = recalibration_batches(len(split), batch, batches, seed, in_order=split.in_order)
        for number, indices in enumerate(chosen):
            drawn = _drawn(split, indices, seed, _RECALIBRATION, number)
            if len(indices) < 2:
                continue
            if isinstance(loss, OwnStep):
                loss.loss(model.module, model.inputs(drawn))
            else:
                model.module(model.inputs(pair(drawn)[0]))
    model.module.train()
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def as_initial(model: FlatModel) -> None:
    """Set batch-norm statistics to those that the model's factory made: a learner that evaluates, too, has changed them."""
    ours = {id(buffer) for layer in batch_norms(model.module) for buffer in layer.buffers()}
    for name, buffer in model.module.named_buffers():
        if id(buffer) in ours:
            buffer.copy_(model.initial_buffers[name])


def drawn_for(split: Split, indices: np.ndarray, seed: int, train: bool, start: int) -> Any:
    """The batch of an evaluation that begins with sample `start`."""
    return _drawn(split, indices, seed, _TRAIN if train else _TEST, start)


def sums_of(loss: Loss, output: Any, targets: Any, samples: int) -> dict[str, float]:
    """The loss times the number of samples, and the number of wrong classes, where targets are classes."""
    sums = {"loss": loss(output, targets).item() * samples}
    if isinstance(targets, Tensor) and not targets.is_floating_point() and isinstance(output, Tensor) and output.dim() == 2:
        sums[ERROR] = float((output.argmax(dim=1) != targets).sum())
    return sums


class Measured(NamedTuple):
    """What weights come to on a split of the data, as means over its samples.

    Attributes:
        error: share of wrong classes, or the metric `error` of an own step; NaN where targets are not classes.
        metrics: the others of an own step.
    """

    loss: float
    error: float
    metrics: dict[str, float]


class Measure:
    """Evaluates the weights in a flat model.

    Args:
        train: the training data, for recalibration (and for its own loss, if wanted).
        test: the test data; may be empty.
        seed: of the run; names what samples and model draw, and on which samples is recalibrated: an evaluation of the same
            weights is always the same.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Objective,
        *,
        train: Split,
        test: Split,
        batch: int,
        buffers: Literal["recalibrate", "initial"],
        recalibrate_batches: int,
        seed: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._train = train
        self._test = test
        self._batch = batch
        self._seed = seed
        self._recalibrate_batches = recalibrate_batches if buffers == "recalibrate" else 0
        self._check: Callable[[], None] | None = None
        self._names: set[str] = set()

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call this before each batch; it may raise to end the measuring."""
        self._check = check

    def prepare(self) -> None:
        """Call after the weights have changed."""
        if self._recalibrate_batches:
            recalibrate(self._model, self._loss, self._train, batch=self._batch, batches=self._recalibrate_batches, seed=self._seed)
        else:
            as_initial(self._model)

    def of(self, *, train: bool) -> Measured:
        """Measure on the training or test data; NaN for an empty split. Raises ConfigError where an own step returns no numbers."""
        split = self._train if train else self._test
        if len(split) == 0:
            return Measured(math.nan, math.nan, {})
        self._model.module.eval()
        sums: dict[str, float] = {}
        with torch.no_grad(), kept():
            for start in range(0, len(split), self._batch):
                if self._check is not None:
                    self._check()
                indices = np.arange(start, min(start + self._batch, len(split)))
                batch = drawn_for(split, indices, self._seed, train, start)
                found = self._of_batch(batch, len(indices))
                sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
        self._model.module.train()
        loss, *others = ((name, value / len(split)) for name, value in sums.items())
        metrics = dict(others)
        return Measured(loss[1], metrics.pop(ERROR, math.nan), metrics)

    def names(self, samples: int, calling: Callable[[], AbstractContextManager[None]]) -> tuple[str, ...]:
        """Names of what an evaluation finds: `loss`, `error` perhaps, and metrics; by a first batch of at most so many samples.

        The samples are of the test data, or where there are none of the training data; the step runs inside `calling()`.
        """
        split, purpose = (self._test, _TEST) if len(self._test) else (self._train, _TRAIN)
        indices = np.arange(min(samples, self._batch, len(split)))
        self._model.module.eval()
        with torch.no_grad(), kept():
            batch = _drawn(split, indices, self._seed, purpose, 0)
            with calling():
                found = self._of_batch(batch, len(indices))
        self._model.module.train()
        return tuple(found)

    def _of_batch(self, batch: Any, samples: int) -> dict[str, float]:
        """The loss, and then what else there is, times the number of samples."""
        module = self._model.module
        if isinstance(self._loss, OwnStep):
            loss, metrics = self._loss.measured(module, self._model.inputs(batch))
            self._names = self._names or set(metrics)
            if set(metrics) != self._names:
                now, before = (", ".join(sorted(names)) or "none" for names in (set(metrics), self._names))
                raise ConfigError(f"step: its metrics are {now} of a batch, but {before} of those before: expected the same")
            return {"loss": loss * samples, **{name: value * samples for name, value in metrics.items()}}
        inputs, targets = pair(batch)
        output = module(self._model.inputs(inputs))
        targets = moved(targets, self._model.weights.device)
        return sums_of(self._loss, output, targets, samples)


class Unmeasured:
    """In the place of a `Measure`, measures nothing: for a run of which only the order of things is wanted."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Nothing takes long."""

    def prepare(self) -> None:
        """Nothing is to be measured."""

    def of(self, *, train: bool) -> Measured:
        """Neither loss nor error."""
        return Measured(math.nan, math.nan, {})
