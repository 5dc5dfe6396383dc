"""The end of one rank of a group: push and pull of its own stage's slices, and what the group must agree on [Dean12 3].

The shards of one stage decide without those of another (law 2): one may be finished, or at a later clock, or reject what the other
takes. So after each pull, the ranks of a group tell each other what they were answered (`Team.tell`), and go on as one learner that
had pulled all slices by itself: the run is over where any shard says so, a mini-batch is rejected where any rejects it, and where
one clock is promised, those behind pull again.

No deadlock: a rank that tells waits for its group, whose ranks wait at most for answers of their own shards. Such an answer waits
for pushes of other learners' ranks of the same stage, of mini-batches before; these come after a backward pass that waits for
nothing but that learner's own group, at the same mini-batch. So waiting always leads to an earlier mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import Ending, Tag
from mpisgd.exchange.base import Answers
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.roles import Roles


class GroupChannel(LearnerChannel):
    """A stage's end; `roles` and `vectors` are what the stage sees of them, `group` the ranks of all stages of this learner."""

    def __init__(
        self, wire: Communicator, roles: Roles, learner_id: int, group: Sequence[int], *, consistent: bool, **vectors: Any
    ) -> None:
        super().__init__(wire, roles, learner_id, consistent=consistent, **vectors)
        self._one_clock = consistent
        self._group = wire.team(group, [(0, 0) for _ in group])

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """As a learner that pulls the slices of all stages: `clocks` has the oldest of each stage."""
        start_ns = self._wire.now_ns()
        answers = super().pull(min_clock, meanwhile)
        wait_ns, rejected = self._wait_ns, answers.rejected
        while True:
            own = min(answers.clocks)
            told = self._group.tell(Tag.AGREE, (answers.stop, own, max(answers.clocks), int(rejected)))
            endings, oldest, newest, rejections = zip(*told, strict=True)
            stop = min((ending for ending in endings if ending), default=int(Ending.NONE))
            if stop or not self._one_clock or min(oldest) == max(newest):
                break
            if own < max(newest):
                answers = super().pull(max(newest))
                rejected = rejected or answers.rejected
        self._wait_ns, self._pull_ns = wait_ns, self._wire.now_ns() - start_ns - wait_ns
        return Answers(oldest, stop, any(rejections))

    def withdraw(self) -> None:
        super().withdraw()
        self._group.disband()
