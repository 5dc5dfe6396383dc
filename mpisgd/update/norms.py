"""Squared norms of gradients and of their sum on one slice: what the gradient noise scale is estimated from, nearly for nothing.

[McCandlish18] McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch Training (arXiv:1812.06162). Its appendix
A.1 needs squared norms of gradients of two batch sizes; a shard sees both: single gradients, of mu samples, and their sum. Both
are measured with the weights that the gradients have in the sum. The norms of slices add up over the shards;
`analysis/noise_scale.py` does the rest.

A single gradient's norm is known already where it is checked for NaN; the others cost a pass over the slice: 7 us, 63 us, 1.1 ms
for slices of 0.35, 4, 44 MB, of cycles (push, update, pull) of about 0.12, 1, 25 ms. So a shard affords one pass in
`PASS_GRADIENTS` gradients, which keeps the cost below 1 % of a cycle. An update is measured with all its gradients or not at
all. Which ones are depends on counts of gradients alone, never on what is in them, so the choice does not bias the
estimate, and shards that sum the same gradients measure the same updates.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from mpisgd.vectors.flat import squared_norm

PASS_GRADIENTS = 12
"""A shard spends one more pass over its slice for so many gradients."""


class Norms:
    """The squared norms of the update in the making.

    `received` is the squared norm of the gradient that will be added next, or None where nobody has computed it.
    `due`: whether this update is measured; `on`: whether any is.
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self.received: float | None = None
        self._total = 0.0
        self._added = 0
        self._owed = 0
        self.due = on

    def add(self, gradient: np.ndarray | Tensor, weight: float) -> None:
        """A gradient, (slice,) float32, not yet weighted, goes into the sum with this weight."""
        squared = self.received
        if squared is None:
            squared = self._pass(gradient) if self.due else math.nan
        self._total += weight * weight * squared
        self._added += 1
        self.received = None
        self._owed -= 1

    def take(self, summed: np.ndarray | Tensor, gradients: int) -> tuple[float, float]:
        """The update of so many gradients is to be made from `summed`, (slice,) float32: its weighted, undivided sum.

        What was added may be sums of several gradients each. Returns the sum of squared norms of what was added, weighted, by
        `gradients`, and the squared norm of `summed`; each NaN where it was not measured or is too large for float32. Where one
        was added, there is no second batch size, and the sum is not measured.
        """
        gradient_sq = self._total / gradients if gradients else math.nan
        sum_sq = self._pass(summed) if self.due and self._added > 1 and math.isfinite(gradient_sq) else math.nan
        self._total = 0.0
        self._added = 0
        self._owed = max(0, self._owed)
        self.due = self._on and self._owed == 0
        return (_finite(gradient_sq), _finite(sum_sq)) if self._on else (math.nan, math.nan)

    def _pass(self, vector: np.ndarray | Tensor) -> float:
        self._owed += PASS_GRADIENTS
        return squared_norm(vector)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
