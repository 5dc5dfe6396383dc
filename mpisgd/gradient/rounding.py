"""Gradients pushed as bfloat16, half the bytes, with error feedback (arXiv:1901.09847).

    v = g + r        q = bfloat16(v), to nearest even        r = v - q

g: gradient, r: remainder, q: push. All pushes plus the remainder sum to all gradients, up to float32 rounding. An element of r is
at most 1/256 of v's. Shards sum, step and serve in float32.

A dropped or rejected push loses its remainder. No checkpoint has remainders: a continued run differs in bits; replay goes by
attempts, and has the bits of both.
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
"""Elements per pass: 2.5 MiB of gradient, remainder and push stay in cache.

11 M elements take 7.2 ms; with 2^16, 9.3 ms: torch takes 10 µs to begin a pass.
"""


class Rounding:
    """A learner's remainder and push.

    Attributes:
        sent: (parameters,) bfloat16.
        bits: the same memory as int16, for numpy and MPI.
    """

    def __init__(self, parameters: int) -> None:
        self.bits = np.zeros(parameters, np.int16)
        self.sent: Tensor = torch.from_numpy(self.bits).view(torch.bfloat16)
        self._remainder = host_vector(parameters)

    @property
    def remainder(self) -> Tensor:
        """(parameters,) float32, added to the next gradient."""
        return self._remainder

    def round(self, gradient: Tensor, start: int = 0, end: int | None = None) -> float:
        """Fill `sent` from `gradient`, (parameters,) float32, for elements `start` to `end`; return |r| / |v|.

        Returns 0 where |r|^2 is 0 in float32; NaN for a non-finite gradient, or beyond 3.39e38 in bfloat16: the remainder is 0
        there.
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
            return float(remainder.double().norm() / sent.double().norm())  # squares overflow beyond 1e19
        return math.sqrt(rest / whole) if rest > 0 else 0.0


class Rounded(Travels):
    """A learner's rounded gradient; `memory.gradients` are the `bits` of `Rounding`, (parameters,) int16, or of `Largest`.

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
