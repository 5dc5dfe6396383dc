"""Loss and error of weights on a split of the data, and the policy for batch-norm statistics (DESIGN 5).

Buffers that are no parameters are never exchanged: a learner's running statistics describe its own weights and mini-batches,
not the snapshot's. `recalibrate` measures them anew, at the weights to be evaluated, as the plain mean over some training
mini-batches, drawn at random by the run's seed, on every rank and in every evaluation the same ones; `initial` leaves what the
model factory made, for models that do not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.draws import kept, seed_all, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import EvaluationOptions
from mpisgd.data import Batch, Split
from mpisgd.data.sampling import recalibration_batches
from mpisgd.gradient.gradient import Loss
from mpisgd.vectors.flat import FlatModel

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


def _drawn(split: Split, indices: np.ndarray, seed: int, purpose: int, number: int) -> Batch:
    """Fetch these samples. What they draw, and the model after them, depends on the other names alone (law 5)."""
    seed_all(seeds_of(Domain.EVALUATION, seed, purpose, number))
    return split.batch(indices)


def recalibrate(model: FlatModel, split: Split, *, batch: int, batches: int, seed: int) -> None:
    """Set batch-norm statistics to their plain mean over `recalibration_batches` of the training samples.

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
        for number, indices in enumerate(recalibration_batches(len(split), batch, batches, seed)):
            inputs, _ = _drawn(split, indices, seed, _RECALIBRATION, number)
            if len(inputs) > 1:
                model.module(model.inputs(inputs))
    model.module.train()
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def as_initial(model: FlatModel) -> None:
    """Set batch-norm statistics to those that the model's factory made: a learner that evaluates, too, has changed them."""
    ours = {id(buffer) for layer in batch_norms(model.module) for buffer in layer.buffers()}
    for name, buffer in model.module.named_buffers():
        if id(buffer) in ours:
            buffer.copy_(model.initial_buffers[name])


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
        loss: Loss,
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

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call this before each batch; it may raise to end the measuring."""
        self._check = check

    def prepare(self) -> None:
        """Call after the weights have changed."""
        if self._recalibrate_batches:
            recalibrate(self._model, self._train, batch=self._batch, batches=self._recalibrate_batches, seed=self._seed)
        else:
            as_initial(self._model)

    def of(self, *, train: bool) -> tuple[float, float]:
        """(mean loss per sample, share of wrong classes) on the training or test data.

        NaN for an empty split; the error is NaN where targets are not classes.
        """
        split = self._train if train else self._test
        if len(split) == 0:
            return math.nan, math.nan
        self._model.module.eval()
        total, wrong, classes = 0.0, 0, False
        with torch.no_grad(), kept():
            for start in range(0, len(split), self._batch):
                if self._check is not None:
                    self._check()
                indices = np.arange(start, min(start + self._batch, len(split)))
                inputs, targets = _drawn(split, indices, self._seed, _TRAIN if train else _TEST, start)
                output = self._model.module(self._model.inputs(inputs))
                targets = targets.to(self._model.weights.device)
                total += self._loss(output, targets).item() * len(inputs)
                classes = not targets.is_floating_point() and isinstance(output, Tensor) and output.dim() == 2
                if classes:
                    wrong += int((output.argmax(dim=1) != targets).sum())
        self._model.module.train()
        return total / len(split), wrong / len(split) if classes else math.nan


class Unmeasured:
    """In the place of a `Measure`, measures nothing: for a run of which only the order of things is wanted."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Nothing takes long."""

    def prepare(self) -> None:
        """Nothing is to be measured."""

    def of(self, *, train: bool) -> tuple[float, float]:
        """Neither loss nor error."""
        return math.nan, math.nan
