"""Gradients that travel as bfloat16: half of the bytes, and what is rounded off comes later (error feedback, arXiv:1901.09847).

A learner pushes the sum of its gradient g and of its remainder r, rounded, and keeps what was rounded off as its remainder:

    v = g + r        q = bfloat16(v), to nearest even        r = v - q

So all that it has pushed and its remainder sum to all its gradients, to float32's own rounding. An element of r is at most 1/256 of
its v: bfloat16 has the exponents of float32 and 8 bits of its significand. Shards sum, step and serve weights in float32.

What a shard drops or rejects takes along the remainder that was in it. Each attempt of a run begins without remainders, which are
in no checkpoint: a run that is continued has not the bits of one without interruption. Replay, which goes through attempts one by
one, has the bits of every run.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.gradient.largest import Largest
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite, squared_norm
from mpisgd.vectors.memory import Memory, SizedVector, host_vector, host_view
from mpisgd.vectors.push_format import BFLOAT16, PushFormat

_CHUNK = 2**18
"""Elements that are gone over at once, so that gradient, remainder and what is sent of them stay in the cache: 2.5 MiB. 11 M
elements take 7.2 ms; in chunks of 2^16 9.3, for torch takes 10 µs to begin each pass."""


class Rounding:
    """A learner's remainder, and what it pushes.

    Attributes:
        sent: (parameters,) bfloat16, the last gradient as it is pushed.
        bits: the same memory as (parameters,) int16, which numpy and MPI know.
    """

    def __init__(self, parameters: int) -> None:
        self.bits = np.zeros(parameters, np.int16)
        self.sent: Tensor = torch.from_numpy(self.bits).view(torch.bfloat16)
        self._remainder = host_vector(parameters)

    @property
    def remainder(self) -> Tensor:
        """(parameters,) float32: what the next gradient will be added to."""
        return self._remainder

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Let `sent` be what is pushed of `gradient`, (parameters,) float32, from element `start` to `end`.

        Returns |r| / |v| of these, what was rounded off; 0 where there is nothing, or so little that its square is 0 in float32.
        NaN: something was not finite, in the gradient or, beyond 3.39e38, in bfloat16; there the remainder is 0.
        """
        whole = rest = 0.0
        end = len(self.bits) if end is None else end
        for at in range(start, end, _CHUNK):
            part = slice(at, min(at + _CHUNK, end))
            remainder, sent = self._remainder[part], self.sent[part]
            left = host_view(remainder.add_(gradient[part]))
            whole += squared_norm(left)
            sent.copy_(remainder)
            remainder.sub_(sent)
            rest += squared_norm(left)
        if not math.isfinite(whole + rest):
            remainder, sent = self._remainder[start:end], self.sent[start:end]
            if not is_finite(host_view(remainder)):
                remainder.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                return math.nan
            return float(remainder.double().norm() / sent.double().norm())  # beyond 1e19, squares are infinite
        return math.sqrt(rest / whole) if rest > 0 else 0.0


class Rounded(Travels):
    """A learner's gradient, rounded; `memory.gradients` are the bits of `Rounding.sent`, (parameters,) int16, or of `Largest`.

    Args:
        gradient: computes; or, where only sizes travel, stands for that.
        bounds: the parts that are rounded by themselves: slices that are exchanged one by one, or stages of a model, each of which
            may be of several slices; by default, all is one.
        tell_nonfinite: give a gradient that is not finite, once rounded, the loss NaN, so that all shards drop it alike.
        push_format, slices: how it travels, where that is not as bfloat16, and the slices of the shards.
        told_at_once: all shards are told the same of what was rounded off: the largest share of any part's.
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
            self._rounding = Largest(push_format, slices) if largest else Rounding(len(self._vector))
            pushed: Any = self._rounding.bits
        else:
            pushed = SizedVector(cuts[-1][1]) if largest else push_format.sized(below.gradients)
        self._bounds = bounds or [(0, len(self._vector) if self._vector is not None else 0)]
        self._rounded = [0.0 for _ in self._bounds]
        ends = [end for _, end in self._bounds]
        self._part_of = [bisect.bisect(ends, start) for start, _ in slices] if len(ends) > 1 else [0 for _ in slices]
        self.memory = Memory(below.weights, pushed, cuts=cuts)
        self._before: Tensor | None = None
        """The remainder before this mini-batch, where it may be given up after it was rounded: while the learner is late."""
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
        """Compute the gradient of mini-batch `seq` and round it; returns the loss."""
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
        """Of a part; where slices are exchanged one by one, each is one."""
        if self._vector is not None:
            self._rounded[shard] = self._rounding.round(self._vector, *self._bounds[shard])
        self.rounded = max(self._rounded, key=_worse) if self._told_at_once else self._rounded[0]

    def rounded_of(self, shard: int) -> float:
        return self.rounded if self._told_at_once else self._rounded[self._part_of[shard]]

    def take_own_step(self) -> None:
        """Along the gradient as it was computed."""
        self._gradient.take_own_step()


def _worse(share: float) -> float:
    """NaN, something that is not finite, is worse than any share."""
    return math.inf if math.isnan(share) else share
