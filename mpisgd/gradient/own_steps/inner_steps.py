"""Local SGD and DiLoCo: a learner takes H steps with an optimiser of its own, and pushes how far it came [DiLoCo Alg. 1].

    theta = theta_pulled                      the weights that were pulled, of one clock or, asynchronously, of several
    H times: theta = InnerOpt(theta, g)       g: the gradient of the learner's next mini-batch, clipped
    push theta_pulled - theta                 the outer gradient, which shards treat as any other: sum, weight, step

With SGD inside, and an outer step of plain SGD at rate 1, this is local SGD (federated averaging); with AdamW inside and Nesterov
momentum outside it is DiLoCo. Schedule, groups of parameters and clipping are those of the inner steps; the outer rate is constant.

The inner optimiser goes on from one round to the next; only the weights are pulled anew. Its state is in no checkpoint: each
attempt of a run begins without, so a run that is continued has not the bits of one without interruption. Replay, which goes through
attempts one by one, has the bits of every run. What a shard drops or rejects has moved the state all the same.
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
    """Computes a round of `count` mini-batches: round r has the learner's mini-batches r * count to r * count + count - 1.

    The loss is the mean of theirs, the samples are those of all.

    Args:
        gradient: computes single mini-batches; what it leaves in `memory.gradients`, (parameters,) float32, is replaced by the
            outer gradient; `memory.weights`, as large, are those that were pulled, and then its own.
        options: of the inner optimiser.
        rate: learning rate of the k-th inner step from weights of a clock, k from 0.
        segments: groups of parameters, with rates and weight decays of their own.
        tell_nonfinite: give an outer gradient that is not finite the loss NaN, so that all shards drop it.
        fused: as in `make_optimizer`.

    Raises ProtocolError where the weights are those of a team.
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
            raise ProtocolError("InnerSteps in shared memory: a learner's own steps would move the weights of its whole team")
        self.samples = 0
        if self.memory.has_numbers:
            self._weights, self._vector = self.memory.tensors
            self._pulled = vector_like(self._weights)
            self._begin()

    def _begin(self) -> None:
        """Make the inner optimiser anew."""
        parameter = torch.nn.Parameter(self._weights)
        self._optimizer = make_optimizer(self._options, parameter, self._rate(0, 0), begun=True, fused=self._fused)
        self._step = Stepper(self._optimizer, parameter, self._segments, fused=self._fused)

    def prepare(self, seq: int) -> None:
        """Do what the first mini-batch of a round needs before its weights are known."""
        self._gradient.prepare(seq * self._count)

    def at_clock(self, clock: int) -> None:
        self._clock = clock

    def compute(self, seq: int) -> float:
        """Compute a round from the weights that are there; returns the mean loss."""
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
            self._begin()  # else nothing that it made would ever be finite again
            if self._tell_nonfinite:
                return math.nan
        return loss / self._count
