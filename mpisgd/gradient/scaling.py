"""Loss scaling for float16, whose gradients are lost below 6e-8 and are infinite above 65504 (arXiv:1710.03740).

As `torch.amp.GradScaler` does it: the loss is multiplied by a scale before the backward pass, and the gradient is divided by it.
The scale is halved where the gradient is not finite, and doubled after many that were. GradScaler then makes no step. Here shards
step, and every mini-batch is pushed: it is computed again, at half the scale, until it is finite.

The scale is the learner's own, and follows from the mini-batches that it has computed since the run began or was resumed: replay,
which computes the same ones, has the same. One that is given up half-way changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from mpisgd.vectors.computing import Scaled
from mpisgd.vectors.flat import FlatModel, is_finite, pass_back

FIRST, LARGEST = 2.0**16, 2.0**24
GROWS_AFTER = 2000
"""Gradients in a row that were finite at once; as GradScaler's `growth_interval`."""


class LossScale:
    """The scale of one learner, a power of two: dividing by it loses nothing.

    Attributes:
        scale: of the next pass.
        scaled: that of the last one.
    """

    def __init__(self) -> None:
        self.scale = FIRST
        self.scaled = Scaled()
        self._finite = 0

    def passes(self, forward: Callable[[], Tensor], model: FlatModel) -> Tensor:
        """Forward and backward pass: the gradient is in the model; returns the loss.

        What is not finite without a scale either, or because the loss is not, is left so, and the scale is what it was.
        """
        scale = self.scale
        while True:
            loss = forward()
            pass_back(model, loss * scale)
            model.take_gradients_back()
            finite = is_finite(model.gradients)
            if finite or scale <= 1.0 or not math.isfinite(loss.item()):
                break
            scale /= 2
            model.zero_gradients()
        model.gradients.div_(scale)
        self.scaled.by = scale
        if finite:
            self._keep(scale)
        return loss

    def _keep(self, scale: float) -> None:
        self._finite = self._finite + 1 if scale == self.scale else 0
        self.scale = scale
        if self._finite == GROWS_AFTER:
            self.scale, self._finite = min(2 * scale, LARGEST), 0
