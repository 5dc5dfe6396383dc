"""A learner's own steps between pulls: Downpour's n_push and n_fetch [Dean12 4.1], SSP's local updates [ElasticDL].

A plain SGD step follows each mini-batch, and the sum of gradients is pushed. The last step is taken during the push [ElasticDL], or
left out before a pull.

The schedule counts applied samples by the pulled clock, one push per update. (SSP also counts discarded gradients: own steps then
run ahead of the shard.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import ProtocolError
from mpisgd.update.groups import Segment
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.skipped import common


class LocalSteps(Travels):
    """A round of mini-batches r * count to r * count + count - 1, as the learner's r-th.

    Args:
        gradient: single mini-batches; their sum overwrites `memory.gradients`.
        rate: rate of own steps, by the weights' clock.
    """

    def __init__(self, gradient: Travels, count: int, rate: Callable[[int], float], segments: Sequence[Segment] = ()) -> None:
        self._segments = [each for each in segments if each.rate != 1.0]
        self._gradient = gradient
        self._count = count
        self._rate = rate
        self._alpha = np.float32(rate(0))
        self.memory = memory = gradient.memory
        self.waited, self.scaled = gradient.waited, gradient.scaled
        if memory.shared:
            raise ProtocolError("LocalSteps in shared memory: a learner's own steps would move the weights of the whole team")
        self.samples = 0
        self._step: Any = np.empty_like(memory.weights) if memory.has_numbers else None
        self._accrued = np.empty_like(memory.gradients) if memory.has_numbers and count > 1 else None

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq * self._count)

    def at_clock(self, clock: int) -> None:
        """Set the rate until the next pull."""
        self._alpha = np.float32(self._rate(clock))

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def compute(self, seq: int) -> float:
        first, loss, self.samples = seq * self._count, 0.0, 0
        for number in range(first, first + self._count):
            if number > first:
                self.take_own_step()
                self._gradient.prepare(number)
            loss += self._gradient.compute(number)
            self.samples += self._gradient.samples
            self.skipped = common(self.skipped, self._gradient.skipped) if number > first else self._gradient.skipped
            if self._accrued is not None:
                self._accrue(self._accrued, first=number == first)
        if self._accrued is not None:
            self.memory.gradients[:] = self._accrued
        return loss / self._count

    def _accrue(self, accrued: np.ndarray, first: bool) -> None:
        """Sum gradients, and store the step: at the round's end the sum overwrites the gradient."""
        self._make_step()
        if first:
            accrued[:] = self.memory.gradients
        else:
            np.add(accrued, self.memory.gradients, out=accrued)

    def take_own_step(self) -> None:
        """Take the last mini-batch's step; only read the pushed memory."""
        if self._step is None:
            return
        if self._accrued is None:
            self._make_step()
        np.subtract(self.memory.weights, self._step, out=self.memory.weights)

    def _make_step(self) -> None:
        np.multiply(self.memory.gradients, self._alpha, out=self._step)
        for each in self._segments:
            self._step[each.start : each.stop] *= np.float32(each.rate)
