"""Several mini-batches pushed as one: at the same weights, or with an own step of the learner after each."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpisgd.base.errors import ProtocolError
from mpisgd.config import OptimizerOptions
from mpisgd.update.groups import Segment
from mpisgd.update.optimizer import Stepper, make_optimizer
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import clip, is_finite
from mpisgd.vectors.memory import vector_like
from mpisgd.vectors.skipped import NOTHING, common


class Several(Travels):
    """Mini-batches s * count to s * count + count - 1, as the learner's s-th.

    Args:
        gradient: single mini-batches; the push overwrites `memory.gradients`, own weights `memory.weights`.
    """

    def __init__(self, gradient: Travels, count: int) -> None:
        self._gradient = gradient
        self._count = count
        self.memory, self.waited, self.scaled = gradient.memory, gradient.waited, gradient.scaled
        self.samples = 0
        if self.memory.has_numbers:
            self._weights, self._vector = self.memory.tensors

    def _step_alone(self) -> None:
        """Raise ProtocolError in shared memory."""
        if self.memory.shared:
            name = type(self).__name__
            raise ProtocolError(f"{name} in shared memory: a learner's own steps would move the weights of the whole team")

    @property
    def single(self) -> Any:
        return self._gradient

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq * self._count)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def move_out(self) -> None:
        self._gradient.move_out()

    def compute(self, seq: int) -> float:
        first, loss, self.samples = seq * self._count, 0.0, 0
        for place in range(self._count):
            if place:
                self._gradient.prepare(first + place)
            loss += self._gradient.compute(first + place)
            self.samples += self._gradient.samples
            self.skipped = common(self.skipped, self._gradient.skipped) if place else self._gradient.skipped
            if self.memory.has_numbers:
                self._take(place)
        return loss / self._count

    @abstractmethod
    def _take(self, place: int) -> None:
        """Take the gradient of mini-batch `place` of the push, from 0."""


class Accumulated(Several):
    """The mean gradient, clipped; all mini-batches at the same weights."""

    def __init__(self, gradient: Travels, count: int, *, clip_norm: float, tell_nonfinite: bool) -> None:
        super().__init__(gradient, count)
        self._clip_norm = clip_norm
        self._tell_nonfinite = tell_nonfinite
        if self.memory.has_numbers:
            self._sum = vector_like(self._vector)

    def compute(self, seq: int) -> float:
        loss = super().compute(seq)
        if self.memory.has_numbers:
            torch.div(self._sum, self._count, out=self._vector)
            clip(self._vector, self._clip_norm)
            if self._tell_nonfinite and not is_finite(self.memory.gradients):
                return math.nan
        return loss

    def _take(self, place: int) -> None:
        if place:
            self._sum.add_(self._vector)
        else:
            self._sum.copy_(self._vector)


class LocalSteps(Several):
    """The sum of gradients, with a plain SGD step after each: Downpour [Dean12 4.1], SSP's local updates [ElasticDL].

    The last step is taken during the push [ElasticDL], or left out before a pull. The schedule counts applied samples by the pulled
    clock, one push per update. (SSP also counts discarded gradients: own steps then run ahead of the shard.)

    Args:
        rate: rate of own steps, by the weights' clock.
    """

    def __init__(self, gradient: Travels, count: int, rate: Callable[[int], float], segments: Sequence[Segment] = ()) -> None:
        super().__init__(gradient, count)
        self._step_alone()
        self._segments = [each for each in segments if each.rate != 1.0]
        self._rate = rate
        self.at_clock(0)
        if self.memory.has_numbers:
            self._step = vector_like(self._vector)
            self._sum = vector_like(self._vector) if count > 1 else None

    def at_clock(self, clock: int) -> None:
        """Set the rate until the next pull."""
        self._alpha = float(np.float32(self._rate(clock)))

    def compute(self, seq: int) -> float:
        loss = super().compute(seq)
        if self.memory.has_numbers and self._sum is not None:
            self._vector.copy_(self._sum)
        return loss

    def _take(self, place: int) -> None:
        if self._sum is None:
            return
        self._make_step()
        if place:
            self._sum.add_(self._vector)
        else:
            self._sum.copy_(self._vector)
        if place + 1 < self._count:
            self.take_own_step()

    def take_own_step(self) -> None:
        """Take the last mini-batch's step; only read the pushed memory."""
        if not self.memory.has_numbers:
            return
        if self._sum is None:
            self._make_step()
        self._weights.sub_(self._step)

    def _make_step(self) -> None:
        torch.mul(self._vector, self._alpha, out=self._step)
        for each in self._segments:
            self._step[each.start : each.stop].mul_(float(np.float32(each.rate)))


class InnerSteps(Several):
    """Local SGD and DiLoCo: steps with the learner's own optimiser; the distance is pushed [DiLoCo Alg. 1].

        theta = theta_pulled                      of one clock, or of several
        count times: theta = InnerOpt(theta, g)   g: clipped gradient of the learner's next mini-batch
        push theta_pulled - theta                 outer gradient, for shards like any other

    Schedule, parameter groups and clipping are the inner steps'; the outer rate is constant. Inner state survives pushes, also
    dropped or rejected, but is in no checkpoint: a continued run differs in bits.

    Args:
        rate: rate of an inner step, by the weights' clock and the step's number from 0.
    """

    def __init__(
        self,
        gradient: Travels,
        count: int,
        options: OptimizerOptions,
        rate: Callable[[int, int], float],
        *,
        segments: Sequence[Segment] = (),
        tell_nonfinite: bool,
        fused: bool = False,
    ) -> None:
        super().__init__(gradient, count)
        self._step_alone()
        self._options = options
        self._rate = rate
        self._segments = segments
        self._fused = fused
        self._tell_nonfinite = tell_nonfinite
        self._clock = 0
        if self.memory.has_numbers:
            self._pulled = vector_like(self._weights)
            self._begin()

    def _begin(self) -> None:
        parameter = torch.nn.Parameter(self._weights)
        self._optimizer = make_optimizer(self._options, parameter, self._rate(0, 0), begun=True, fused=self._fused)
        self._step = Stepper(self._optimizer, parameter, self._segments, fused=self._fused)

    def at_clock(self, clock: int) -> None:
        self._clock = clock

    def compute(self, seq: int) -> float:
        if not self.memory.has_numbers:
            return super().compute(seq)
        self._pulled.copy_(self._weights)
        loss = super().compute(seq)
        self.skipped = NOTHING  # a distance has all elements
        torch.sub(self._pulled, self._weights, out=self._vector)
        if not is_finite(self.memory.gradients):
            self._begin()  # a non-finite state would never be finite again
            if self._tell_nonfinite:
                return math.nan
        return loss

    def _take(self, place: int) -> None:
        self._optimizer.param_groups[0]["lr"] = self._rate(self._clock, place)
        self._step.skip(self._gradient.skipped)
        self._step(self._vector, 1, 0, len(self._vector))
