"""Loss and error of weights on a split, and the policy for batch-norm statistics (DESIGN 5).

Evaluations have learner 0's buffers (`checkpoint/buffers.py`). For batch-norm statistics, `recalibrate` takes means at the
evaluated weights, over training mini-batches drawn by the run's seed; `initial` keeps the factory's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpisgd.base.draws import kept, seed_all, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import Config, Part
from mpisgd.data import DataSet, Split
from mpisgd.data.dataset import IGNORED
from mpisgd.data.sampling import recalibration_batches
from mpisgd.gradient.gradient import moved, pair
from mpisgd.gradient.objective import Loss, Objective, OwnStep
from mpisgd.vectors import nest
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.kept_state import is_stateful

ERROR = "error"
"""An own step's metric in place of the share of wrong classes."""
COUNTED = "counted"
"""Key of the number of samples."""

_FEW = 8
_TWICE = 1e-4

_RECALIBRATION = 2
_PURPOSES = {Part.TEST: 0, Part.TRAINING: 1, Part.VALIDATION: 3}
"""Seed names of evaluations."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return layers with running statistics, except layers kept in `eval` mode."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training]


def batch_norm_policy(module: nn.Module, config: Config, train_samples: int) -> str:
    layers, options, policy = len(batch_norms(module)), config.evaluation, config.buffers_evaluated
    if not layers:
        return "no batch-norm layers" + (", buffers: learner 0's" if config.hands_state_on and is_stateful(module) else "")
    samples = min(train_samples, options.batch * options.recalibrate_batches)
    on = f" on {samples:,} of {train_samples:,} training samples, drawn at random" if policy == "recalibrate" else ""
    return f"{'learner 0' + chr(39) + 's' if policy == 'learner' else policy}{on} ({layers} layer{'s' * (layers > 1)})"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Enter `eval` mode without gradients; restore training and generators at the end."""
    module.eval()
    try:
        with torch.no_grad(), kept():
            yield
    finally:
        module.train()


def _drawn(split: Split, indices: np.ndarray, seed: int, purpose: int, number: int) -> Any:
    """Fetch samples; seed generators by names alone (law 5)."""
    seed_all(seeds_of(Domain.EVALUATION, seed, purpose, number))
    return split.batch(indices)


def recalibrate(model: FlatModel, loss: Objective, split: Split, *, batch: int, batches: int, seed: int) -> None:
    """Set batch-norm statistics to their mean over `recalibration_batches`; other layers run in `eval` mode.

    An own step is called: only the step knows how batches enter the model.
    """
    layers = batch_norms(model.module)
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
        layer.momentum = None  # type: ignore[assignment]
    with evaluating(model.module):
        for layer in layers:
            layer.train()
        chosen = recalibration_batches(len(split), batch, batches, seed, in_order=split.in_order)
        for number, indices in enumerate(chosen):
            drawn = _drawn(split, indices, seed, _RECALIBRATION, number)
            if len(indices) < 2:
                continue
            if isinstance(loss, OwnStep):
                loss.loss(model.module, model.inputs(drawn))
            else:
                model.module(model.inputs(pair(drawn)[0]))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def as_initial(model: FlatModel) -> None:
    """Reset batch-norm statistics: a learner that also evaluates has changed them."""
    model.as_made(batch_norms(model.module))


def drawn_for(split: Split, indices: np.ndarray, seed: int, part: Part, start: int) -> Any:
    return _drawn(split, indices, seed, _PURPOSES[part], start)


def batches_of(split: Split, batch: int) -> Iterator[np.ndarray]:
    size = split.loaded_in or batch
    for start in range(0, len(split), size):
        yield np.arange(start, min(start + size, len(split)))


def sums_of(loss: Loss, output: Any, targets: Any, samples: int, *, summed: bool) -> dict[str, float]:
    """Return the sums of loss and wrong classes (for class targets), and the number of samples.

    Targets ignored by the loss do not count. `summed`: the loss is a sum.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return {"loss": loss(output, targets).item() * (1 if summed else samples), COUNTED: samples}
    counts = targets != ignored_by(loss)
    share = int(counts.sum()) / max(1, targets.numel())
    sums = {COUNTED: samples * share}
    if share > 0:
        sums["loss"] = loss(output, targets).item() * (1 if summed else samples * share)
        if isinstance(output, Tensor) and output.dim() == 2:
            sums[ERROR] = float((output.argmax(dim=1) != targets)[counts].sum())
    return sums


def ignored_by(loss: Loss) -> int:
    given = getattr(loss, "keywords", {}).get("ignore_index", getattr(loss, "ignore_index", None))
    return given if isinstance(given, int) else IGNORED


def is_summed(loss: Callable[..., float], samples: int, *batch: Any) -> bool:
    """Tell whether a loss is a sum over samples: it doubles for samples given twice."""
    found = [0]

    def few(_: str, value: Any, times: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != samples:
            return value
        found[0] += 1
        return torch.cat([value[:_FEW]] * times)

    try:
        one, two = ([nest.mapped(each, partial(few, times=times)) for each in batch] for times in (1, 2))
        if not found[0]:
            return False
        once = loss(*one)
        return once != 0 and math.isclose(loss(*two), 2 * once, rel_tol=_TWICE)
    except Exception:  # any error of user code at another batch size
        return False


def mean_of(sums: dict[str, float]) -> Measured:
    counted = sums.get(COUNTED, 0.0)
    found = {name: value / counted for name, value in sums.items() if name != COUNTED}
    return Measured(found.pop("loss", math.nan), found.pop(ERROR, math.nan), found)


class Measured(NamedTuple):
    """Means over a split's samples.

    Attributes:
        error: share of wrong classes, or an own step's metric `error`; NaN where targets are not classes.
        metrics: an own step's others.
    """

    loss: float
    error: float
    metrics: dict[str, float]


class Measure:
    """Evaluation of the weights in a flat model.

    Args:
        data: the training split is for recalibration; others may be empty.
        seed: names all draws: equal weights give equal results.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Objective,
        *,
        data: DataSet,
        batch: int,
        buffers: str,
        recalibrate_batches: int,
        seed: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._data = data
        self._batch = batch
        self._seed = seed
        self._buffers = buffers
        self._recalibrate_batches = recalibrate_batches
        self._check: Callable[[], None] | None = None
        self._names: set[str] = set()
        self._summed: bool | None = None

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call `check` before each batch; it may raise."""
        self._check = check

    def prepare(self) -> None:
        if self._buffers == "recalibrate":
            train = self._data.train
            batch = (train.loaded_in if train.padded else None) or self._batch
            recalibrate(self._model, self._loss, train, batch=batch, batches=self._recalibrate_batches, seed=self._seed)
        elif self._buffers == "initial":
            as_initial(self._model)

    def of(self, part: Part) -> Measured:
        """Measure a part; NaN for an empty part. Raises ConfigError: an own step's metrics change, or are no numbers."""
        split = self._data.part(part)
        if len(split) == 0:
            return Measured(math.nan, math.nan, {})
        sums: dict[str, float] = {}
        with evaluating(self._model.module):
            for indices in batches_of(split, self._batch):
                start = int(indices[0])
                if self._check is not None:
                    self._check()
                batch = drawn_for(split, indices, self._seed, part, start)
                found = self._of_batch(batch, len(indices))
                sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
        return mean_of(sums)

    def names(self, samples: int, calling: Callable[[], AbstractContextManager[None]]) -> tuple[str, ...]:
        """Return the names of results, from at most `samples` test (else training) samples; the step runs inside `calling()`."""
        part = Part.TEST if len(self._data.test) else Part.TRAINING
        split = self._data.part(part)
        indices = next(batches_of(split, self._batch))[:samples]
        with evaluating(self._model.module):
            batch = drawn_for(split, indices, self._seed, part, 0)
            with calling():
                found = self._of_batch(batch, len(indices))
        return tuple(name for name in found if name != COUNTED)

    def _of_batch(self, batch: Any, samples: int) -> dict[str, float]:
        module = self._model.module
        if isinstance(self._loss, OwnStep):
            step, batch = self._loss, self._model.inputs(batch)
            loss, metrics = step.measured(module, batch)
            if self._summed is None:
                self._summed = is_summed(lambda each: step.measured(module, each)[0], samples, batch)
            self._names = self._names or set(metrics)
            if set(metrics) != self._names:
                now, before = (", ".join(sorted(names)) or "none" for names in (set(metrics), self._names))
                raise ConfigError(f"step: metrics are {now} of a batch, but {before} of earlier batches: expected the same")
            found = {name: value * samples for name, value in metrics.items()}
            return {"loss": loss * (1 if self._summed else samples), **found, COUNTED: samples}
        inputs, targets = pair(batch)
        output = module(self._model.inputs(inputs))
        targets = moved(targets, self._model.weights.device)
        if self._summed is None:
            of = self._loss
            self._summed = is_summed(lambda *given: of(*given).item(), samples, output, targets)
        return sums_of(self._loss, output, targets, samples, summed=self._summed)


class Unmeasured:
    """A `Measure` of nothing, for runs about the order of events."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Do nothing."""

    def prepare(self) -> None:
        """Do nothing."""

    def of(self, part: Part) -> Measured:
        return Measured(math.nan, math.nan, {})
