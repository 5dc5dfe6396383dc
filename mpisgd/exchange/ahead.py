"""Layer by layer, asking ahead: a learner asks for the next weights of each slice as soon as the slice's gradient begins to leave.

For protocols where a learner's pull waits for an update that has its own push (hardsync): asked earlier, it is given the same
weights. So a slice of the top layers is summed, updated and on its way back while the backward pass computes those below. `pull`
waits for what is still under way.

Weights come into memory of their own, and are copied when all are there: a backward pass may yet read weights whose gradient is
done, as where they are used a second time behind `detach`.

No deadlock: the receives of what is asked for are posted, and no push waits for them. A shard may take the pull before the push
ahead of it; it keeps the pull until the update, which waits for the push. What was begun moves while the learner computes
(`Clock.let_move`), or at the latest when it has computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Communicator
from mpisgd.exchange.base import Answers, Report
from mpisgd.exchange.layerwise import PipelinedChannel
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.memory import Memory, copy_into


class AheadChannel(PipelinedChannel):
    """A learner's end; `next_clock` is the protocol's, `memory` that in which it computes, `vectors` as in `LearnerChannel`."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        delays: Delays,
        next_clock: Callable[[int], int],
        memory: Memory,
        **vectors: Any,
    ) -> None:
        self._next_clock = next_clock
        self._into = memory.weights
        if vectors["held"] is None:  # what is rounded comes into memory of its own as it is
            vectors["weights"] = memory.another().weights
        self._come = vectors["weights"]
        self._moves = memory.gradients.nbytes > STILL_NBYTES
        self._asked: dict[int, Any] = {}
        """What was asked for of each shard, and has not been taken."""
        super().__init__(wire, roles, learner_id, delays, **vectors)

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float) -> None:
        clock = self._wire.clock
        clock.hold()
        super().leave(shard, seq, samples, loss, rounded, scale)
        start_ns = self.now_ns()
        (self._asked[shard],) = super()._begin_ask([shard], self._next_clock(self._clocks[shard]))
        self._pushed_for(self.now_ns() - start_ns)
        if self._moves:
            clock.let_move()

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        self._wire.clock.hold()
        super().push(report, meanwhile)

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Take the weights that were asked for, and put them in their place."""
        answers = super().pull(min_clock, meanwhile)
        if self._come is not self._into and not answers.stop:
            copy_into(self._into, self._come)
        return self._begin(answers)

    def _begin_ask(self, shards: list[int], min_clock: int) -> list[Any]:
        """What was asked for ahead, the first time that it is looked for; else as ever."""
        if not self._asked:
            return super()._begin_ask(shards, min_clock)
        asked = [self._asked[shard] for shard in shards]
        self._asked.clear()
        return asked
