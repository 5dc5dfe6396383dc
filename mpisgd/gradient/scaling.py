"""Loss scaling for float16: gradients vanish below 6e-8 and overflow above 65504 (arXiv:1710.03740).

As in `torch.amp.GradScaler`, a scale multiplies the loss and divides the gradient, halved after a non-finite gradient, doubled
after many finite gradients. But a non-finite mini-batch is computed again until finite.

The scale follows from the learner's mini-batches since start or resume; a mini-batch given up changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from mpisgd.vectors.computing import Scaled
from mpisgd.vectors.flat import FlatModel, is_finite, pass_back

FIRST, LARGEST = 2.0**16, 2.0**24
GROWS_AFTER = 2000
"""Gradients in a row, finite at first try; GradScaler's `growth_interval`."""


class LossScale:
    """A learner's scale, a power of two: division is exact.

    Attributes:
        scale: for the next pass.
        scaled: of the last pass.
    """

    def __init__(self) -> None:
        self.scale = FIRST
        self.scaled = Scaled()
        self._finite = 0

    def passes(self, forward: Callable[[], Tensor], model: FlatModel) -> Tensor:
        """Run both passes; return the loss.

        A gradient non-finite at scale 1, or with a non-finite loss, stays non-finite and leaves `scale` unchanged.
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
