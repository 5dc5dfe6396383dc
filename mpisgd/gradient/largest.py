"""Top-k with error feedback (arXiv:1809.07599): only each slice's k largest magnitudes are pushed, the first among equals.

    v = g + r        q = the k largest of v        r = v - q

g: gradient, r: remainder, q: push (`push_format.py`). All pushes plus the remainder sum to all gradients. For dropped pushes and
continued runs, see `rounding.py`.
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
    """A learner's remainder and push, like `rounding.Rounding`.

    Attributes:
        bits: (words,) int32, all slices' pushes, at the format's `cuts`.
    """

    def __init__(self, push_format: PushFormat, bounds: Sequence[tuple[int, int]]) -> None:
        cuts = push_format.cuts(bounds)
        self.bits = np.zeros(cuts[-1][1], np.int32)
        self._slices = [(start, end, self.bits[at:to]) for (start, end), (at, to) in zip(bounds, cuts, strict=True)]
        self._remainder = host_vector(bounds[-1][1])

    @property
    def remainder(self) -> Tensor:
        """(parameters,) float32, added to the next gradient."""
        return self._remainder

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Fill `bits` from `gradient`, (parameters,) float32, for slices within `start` to `end`; return |r| / |v|.

        NaN: v is not finite; its slice is pushed as NaN, and non-finite remainders become 0.
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
        """Move a slice's largest elements from `left` to `words`, (2, k) int32."""
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
    """Return |vector|^2; in float64 where float32 squares overflow."""
    found = squared_norm(vector)
    return found if math.isfinite(found) else float(np.dot(vector.astype(np.float64), vector))
