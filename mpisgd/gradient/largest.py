"""The largest elements of a gradient alone, few bytes; what is left out comes later (top-k with error feedback, arXiv:1809.07599).

A learner pushes, of the sum of its gradient g and of its remainder r, in each slice the k elements that are largest by magnitude,
of equals the first, and keeps all others as its remainder:

    v = g + r        q = the k largest of v        r = v - q

So all that it has pushed and its remainder sum to all its gradients. What shards drop, and what becomes of remainders where a run
is continued, is as with rounding (`rounding.py`). `push_format.py` says how q travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from mpisgd.vectors.flat import is_finite, squared_norm
from mpisgd.vectors.memory import host_vector, host_view
from mpisgd.vectors.push_format import PushFormat


class Largest:
    """A learner's remainder, and what it pushes; to be used as a `rounding.Rounding`.

    Attributes:
        bits: (words,) int32, what is pushed of all slices, at the format's `cuts`.
    """

    def __init__(self, push_format: PushFormat, bounds: Sequence[tuple[int, int]]) -> None:
        cuts = push_format.cuts(bounds)
        self.bits = np.zeros(cuts[-1][1], np.int32)
        self._slices = [(start, end, self.bits[at:to]) for (start, end), (at, to) in zip(bounds, cuts, strict=True)]
        self._remainder = host_vector(bounds[-1][1])

    @property
    def remainder(self) -> Tensor:
        """(parameters,) float32: what the next gradient will be added to."""
        return self._remainder

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Let `bits` be what is pushed of `gradient`, (parameters,) float32, in the slices from element `start` to `end`.

        Returns |r| / |v| of these; 0 where there is nothing. NaN: something was not finite; its slice is pushed as NaN, and what
        was not finite of the remainder is 0.
        """
        whole = rest = 0.0
        end = len(self._remainder) if end is None else end
        for at, to, words in self._slices:
            if start <= at and to <= end:
                left = host_view(self._remainder[at:to].add_(gradient[at:to]))
                whole += _squared(left)
                self._take_out(left, words.reshape(2, -1))
                rest += _squared(left) if math.isfinite(whole) else math.nan
        return math.sqrt(rest / whole) if whole else 0.0

    def _take_out(self, left: np.ndarray, words: np.ndarray) -> None:
        """The largest elements of a slice go from `left` into `words`, (2, k) int32."""
        indices, values = words[0], words[1].view(np.float32)
        if not is_finite(left):
            np.nan_to_num(left, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            indices[:], values[:] = np.arange(len(indices)), math.nan
            return
        magnitudes = np.abs(left)
        least = np.partition(magnitudes, len(left) - len(indices))[len(left) - len(indices)]
        chosen = np.flatnonzero(magnitudes >= least)
        if len(chosen) > len(indices):
            equal = np.flatnonzero(magnitudes[chosen] == least)
            chosen = np.delete(chosen, equal[len(indices) - len(chosen) :])
        indices[:], values[:] = chosen, left[chosen]
        left[chosen] = 0.0


def _squared(vector: np.ndarray) -> float:
    """|vector|^2; beyond 1e19, where squares are infinite in float32, summed in float64."""
    found = squared_norm(vector)
    return found if math.isfinite(found) else float(np.dot(vector.astype(np.float64), vector))
