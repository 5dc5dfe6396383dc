"""Local SGD and DiLoCo: a learner takes H steps with its own optimiser and pushes the distance [DiLoCo Alg. 1].

    theta = theta_pulled                      of one clock or, asynchronously, of several
    H times: theta = InnerOpt(theta, g)       g: clipped gradient of the learner's next mini-batch
    push theta_pulled - theta                 outer gradient, for shards like any other

SGD inside and SGD at rate 1 outside is local SGD; AdamW inside and Nesterov momentum outside is DiLoCo. Schedule, parameter groups
and clipping are the inner steps'; the outer rate is constant.

Inner state survives rounds, and dropped or rejected pushes, but is in no checkpoint: a continued run differs in bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mpisgd.base.errors import ProtocolError
from mpisgd.config import OptimizerOptions
from mpisgd.update.groups import Segment
from mpisgd.update.optimizer import Stepper, make_optimizer
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import vector_like


class InnerSteps(Travels):
    """A round of mini-batches r * count to r * count + count - 1, as the learner's r-th.

    Args:
        gradient: single mini-batches; the outer gradient overwrites `memory.gradients`, own weights `memory.weights`.
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
        self._gradient = gradient
        self._count = count
        self._options = options
        self._rate = rate
        self._segments = segments
        self._fused = fused
        self._tell_nonfinite = tell_nonfinite
        self._clock = 0
        self.memory, self.scaled = gradient.memory, gradient.scaled
        self.waited = gradient.waited
        if self.memory.shared:
            raise ProtocolError("InnerSteps in shared memory: a learner's own steps would move the weights of the whole team")
        self.samples = 0
        if self.memory.has_numbers:
            self._weights, self._vector = self.memory.tensors
            self._pulled = vector_like(self._weights)
            self._begin()

    def _begin(self) -> None:
        parameter = torch.nn.Parameter(self._weights)
        self._optimizer = make_optimizer(self._options, parameter, self._rate(0, 0), begun=True, fused=self._fused)
        self._step = Stepper(self._optimizer, parameter, self._segments, fused=self._fused)

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq * self._count)

    def at_clock(self, clock: int) -> None:
        self._clock = clock

    def compute(self, seq: int) -> float:
        first, loss, self.samples = seq * self._count, 0.0, 0
        if self.memory.has_numbers:
            self._pulled.copy_(self._weights)
        for place in range(self._count):
            if place:
                self._gradient.prepare(first + place)
            loss += self._gradient.compute(first + place)
            self.samples += self._gradient.samples
            if self.memory.has_numbers:
                self._optimizer.param_groups[0]["lr"] = self._rate(self._clock, place)
                self._step.skip(self._gradient.skipped)
                self._step(self._vector, 1, 0, len(self._vector))
        if not self.memory.has_numbers:
            return loss / self._count
        torch.sub(self._pulled, self._weights, out=self._vector)
        if not is_finite(self.memory.gradients):
            self._begin()  # a non-finite state would never be finite again
            if self._tell_nonfinite:
                return math.nan
        return loss / self._count
