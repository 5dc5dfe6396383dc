"""A learner's own steps between pulls: Downpour's n_push and n_fetch [Dean12 4.1], SSP's local updates [ElasticDL].

Several mini-batches are one to the learner's loop: after each the learner takes a step of plain SGD by itself, and what is pushed
is the sum of their gradients. Where the loop does not pull after a push, the next ones go on from the learner's own weights: the
last step is taken while the push is under way [ElasticDL], as both only read the gradient. Before a pull it would be for nothing,
and is not taken.

The schedule is a function of samples applied, of which a learner knows by the clock of the weights that it pulled: under these
protocols each update is of one push. (SSP also counts a gradient that is discarded: then the own steps are so many mini-batches
ahead of the shard's.)
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
    """Computes `count` mini-batches as one: round r has the learner's mini-batches r * count to r * count + count - 1.

    The loss is the mean of theirs, the samples are those of all.

    Args:
        gradient: computes single mini-batches; what it leaves in `memory.gradients` is replaced by the sum.
        rate: learning rate of the learner's own steps, from weights of a clock.
        segments: the groups of parameters, whose factors of the rate hold here, too.

    Raises ProtocolError where the weights are those of a team.
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
            raise ProtocolError("LocalSteps in shared memory: a learner's own steps would move the weights of its whole team")
        self.samples = 0
        self._step: Any = np.empty_like(memory.weights) if memory.has_numbers else None
        self._accrued = np.empty_like(memory.gradients) if memory.has_numbers and count > 1 else None

    def prepare(self, seq: int) -> None:
        """Do what the first mini-batch of a round needs before its weights are known."""
        self._gradient.prepare(seq * self._count)

    def at_clock(self, clock: int) -> None:
        """The schedule's rate there; it stays until weights are pulled again."""
        self._alpha = np.float32(self._rate(clock))

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def compute(self, seq: int) -> float:
        """Compute a round at the weights that are there; returns the mean loss."""
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
        """Add the gradient to the sum; and keep its step, for at the end of the round the sum takes its place."""
        self._make_step()
        if first:
            accrued[:] = self.memory.gradients
        else:
            np.add(accrued, self.memory.gradients, out=accrued)

    def take_own_step(self) -> None:
        """Take the step of the mini-batch computed last; what is pushed is read at most."""
        if self._step is None:
            return
        if self._accrued is None:
            self._make_step()
        np.subtract(self.memory.weights, self._step, out=self.memory.weights)

    def _make_step(self) -> None:
        np.multiply(self.memory.gradients, self._alpha, out=self._step)
        for each in self._segments:
            self._step[each.start : each.stop] *= np.float32(each.rate)
