"""Loss and error of weights on a split of the data, and the policy for batch-norm statistics (DESIGN 5).

Buffers that are no parameters are never exchanged: a learner's running statistics describe its own weights and mini-batches,
not the snapshot's. `recalibrate` measures them anew, at the weights to be evaluated, as the plain mean over some training
mini-batches; `initial` leaves what the model factory made, for models that do not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import nn

from mpisgd.data import Split
from mpisgd.flat import FlatModel
from mpisgd.gradient import Loss

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The layers of a model whose running statistics the policy is about."""
    return [layer for layer in module.modules() if isinstance(layer, _BATCH_NORMS) and layer.track_running_stats]


def batch_norm_policy(module: nn.Module, buffers: str) -> str:
    """What the report says of batch normalisation in this model."""
    layers = len(batch_norms(module))
    return f"{buffers} ({layers} layers)" if layers else "no batch-norm layers"


def recalibrate(model: FlatModel, split: Split, *, batch: int, batches: int) -> None:
    """Set batch-norm statistics to their plain mean over the first `batches` training mini-batches of `batch` samples."""
    layers = batch_norms(model.module)
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
        layer.momentum = None  # type: ignore[assignment]
    model.module.train()
    with torch.no_grad():
        for start in range(0, min(len(split), batch * batches), batch):
            inputs, _ = split.batch(np.arange(start, min(start + batch, len(split))))
            if len(inputs) > 1:
                model.module(model.inputs(inputs))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


class Measure:
    """Evaluates the weights in a flat model.

    Args:
        train: the training data, for recalibration (and for its own loss, if wanted).
        test: the test data; may be empty.
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
    ) -> None:
        self._model = model
        self._loss = loss
        self._train = train
        self._test = test
        self._batch = batch
        self._recalibrate_batches = recalibrate_batches if buffers == "recalibrate" else 0
        self._check: Callable[[], None] | None = None

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call this before each batch; it may raise to end the measuring."""
        self._check = check

    def prepare(self) -> None:
        """Call after the weights have changed."""
        if self._recalibrate_batches:
            recalibrate(self._model, self._train, batch=self._batch, batches=self._recalibrate_batches)

    def of(self, *, train: bool) -> tuple[float, float]:
        """(mean loss per sample, share of wrong classes) on the training or test data.

        NaN for an empty split; the error is NaN where targets are not classes.
        """
        split = self._train if train else self._test
        if len(split) == 0:
            return math.nan, math.nan
        self._model.module.eval()
        total, wrong, classes = 0.0, 0, False
        with torch.no_grad():
            for start in range(0, len(split), self._batch):
                if self._check is not None:
                    self._check()
                inputs, targets = split.batch(np.arange(start, min(start + self._batch, len(split))))
                output = self._model.module(self._model.inputs(inputs))
                targets = targets.to(output.device)
                total += self._loss(output, targets).item() * len(inputs)
                classes = not targets.is_floating_point() and output.dim() == 2
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
