"""Gradients pushed in a smaller format, with error feedback: the unpushed rest is added to the next gradient.

    v = g + r        q = format(v)        r = v - q

bfloat16   q = v to nearest even, half the bytes (arXiv:1901.09847); an element of r is at most 1/256 of v's
top-k      q = each slice's k largest magnitudes of v, the first among equals (arXiv:1809.07599; `push_format.py`)

g: gradient, r: remainder, q: push. All pushes plus the remainder sum to all gradients, up to float32 rounding. A dropped or
rejected push loses its remainder. No checkpoint has remainders: a continued run differs in bits; replay goes by attempts.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite, squared_norm
from mpisgd.vectors.memory import Memory, SizedVector, host_vector, host_view
from mpisgd.vectors.push_format import BFLOAT16, PushFormat

_CHUNK = 2**18
"""Elements per pass: 2.5 MiB of gradient, remainder and push stay in cache (TRAPS 11)."""


class Remainder(ABC):
    """A learner's remainder and push.

    Attributes:
        remainder: (parameters,) float32, added to the next gradient.
        bits: the push as it travels, for numpy and MPI.
    """

    def __init__(self, parameters: int, bits: np.ndarray) -> None:
        self.remainder = host_vector(parameters)
        self.bits = bits

    @abstractmethod
    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Fill `bits` from `gradient`, (parameters,) float32, of elements `start` to `end`; return |r| / |v|, or NaN."""


class Rounding(Remainder):
    """Rounding to bfloat16; `bits`: (parameters,) int16, `sent`: the same memory as bfloat16."""

    def __init__(self, parameters: int) -> None:
        super().__init__(parameters, np.zeros(parameters, np.int16))
        self.sent: Tensor = torch.from_numpy(self.bits).view(torch.bfloat16)

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Return 0 where |r|^2 is 0 in float32; NaN also beyond 3.39e38, infinite in bfloat16: the remainder is 0 there."""
        whole = rest = 0.0
        end = len(self.bits) if end is None else end
        for at in range(start, end, _CHUNK):
            part = slice(at, min(at + _CHUNK, end))
            remainder, sent = self.remainder[part], self.sent[part]
            left = host_view(remainder.add_(gradient[part]))
            whole += squared_norm(left)
            sent.copy_(remainder)
            remainder.sub_(sent)
            rest += squared_norm(left)
        if not math.isfinite(whole + rest):
            remainder, sent = self.remainder[start:end], self.sent[start:end]
            if not is_finite(host_view(remainder)):
                remainder.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                return math.nan
            return float(remainder.double().norm() / sent.double().norm())  # squares overflow beyond 1e19
        return math.sqrt(rest / whole) if rest > 0 else 0.0


class Largest(Remainder):
    """The largest elements of slices at `bounds`; `bits`: (words,) int32, at the format's `cuts`."""

    def __init__(self, push_format: PushFormat, bounds: Sequence[tuple[int, int]]) -> None:
        cuts = push_format.cuts(bounds)
        super().__init__(bounds[-1][1], np.zeros(cuts[-1][1], np.int32))
        self._slices = [(start, end, self.bits[at:to]) for (start, end), (at, to) in zip(bounds, cuts, strict=True)]

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Round slices within `start` to `end`; a slice not finite is pushed as NaN, and its non-finite remainders become 0."""
        whole = rest = 0.0
        end = len(self.remainder) if end is None else end
        for at, to, words in self._slices:
            if start <= at and to <= end:
                left = host_view(self.remainder[at:to].add_(gradient[at:to]))
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


class Rounded(Travels):
    """A learner's rounded gradient; `memory.gradients` are the `bits` of its `Remainder`.

    Args:
        gradient: the stage before; or a stand-in, where only sizes travel.
        bounds: parts rounded separately: slices exchanged in turn, or a model's stages; default: all.
        slices: the shards'; for top-k, or several `bounds`.
        told_at_once: tell all shards the largest share of any part.
    """

    def __init__(
        self,
        gradient: Travels,
        bounds: Sequence[tuple[int, int]] = (),
        *,
        tell_nonfinite: bool,
        push_format: PushFormat = BFLOAT16,
        slices: Sequence[tuple[int, int]] = (),
        told_at_once: bool = False,
    ) -> None:
        self._gradient = gradient
        self._told_at_once = told_at_once
        self._tell_nonfinite = tell_nonfinite
        self.samples = gradient.samples
        self.waited, self.scaled = gradient.waited, gradient.scaled
        self._vector: Tensor | None = None
        below = gradient.memory
        largest = push_format.name == "topk"
        cuts = push_format.cuts(slices) if largest else []
        if below.has_numbers:
            self._vector = below.tensors[1]
            self._rounding: Remainder = Largest(push_format, slices) if largest else Rounding(len(self._vector))
            pushed: Any = self._rounding.bits
        else:
            pushed = SizedVector(cuts[-1][1]) if largest else push_format.sized(below.gradients)
        self._bounds = bounds or [(0, len(self._vector) if self._vector is not None else 0)]
        self._rounded = [0.0 for _ in self._bounds]
        ends = [end for _, end in self._bounds]
        self._part_of = [bisect.bisect(ends, start) for start, _ in slices] if len(ends) > 1 else [0 for _ in slices]
        self.memory = Memory(below.weights, pushed, cuts=cuts)
        self._before: Tensor | None = None
        """Remainder before this mini-batch, which a late learner may give up."""
        self._taken = False

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def at_clock(self, clock: int) -> None:
        self._gradient.at_clock(clock)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        if self._vector is not None:
            self._before = torch.empty_like(self._rounding.remainder)
        self._gradient.interrupt_by(check)

    def give_up(self) -> None:
        if self._taken and self._before is not None:
            self._rounding.remainder.copy_(self._before)
        self._taken = False
        self._gradient.give_up()

    def begin(self, seq: int) -> None:
        self._gradient.begin(seq)

    def compute(self, seq: int) -> float:
        self._taken = False
        loss = self._gradient.compute(seq)
        self.samples, self.skipped = self._gradient.samples, self._gradient.skipped
        if self._before is not None:
            self._before.copy_(self._rounding.remainder)
            self._taken = True
        return self.finish(loss)

    def finish(self, loss: float) -> float:
        for part in range(len(self._bounds)):
            self.finish_slice(part)
        return math.nan if self._tell_nonfinite and any(map(math.isnan, self._rounded)) else loss

    def finish_slice(self, shard: int) -> None:
        """Round a part of `bounds`."""
        if self._vector is not None:
            self._rounded[shard] = self._rounding.round(self._vector, *self._bounds[shard])
        self.rounded = max(self._rounded, key=_worse) if self._told_at_once else self._rounded[0]

    def rounded_of(self, shard: int) -> float:
        return self.rounded if self._told_at_once else self._rounded[self._part_of[shard]]

    def take_own_step(self) -> None:
        """Step along the unrounded gradient."""
        self._gradient.take_own_step()


def _worse(share: float) -> float:
    """Rank NaN above all shares."""
    return math.inf if math.isnan(share) else share
