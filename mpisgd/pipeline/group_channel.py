"""The end of one rank of a group: push and pull of its own stage's slices, and what the group must agree on [Dean12 3].

The shards of one stage decide without those of another (law 2): one may be finished, or at a later clock, or reject what the other
takes. So after each pull, the ranks of a group tell each other what they were answered (`Team.tell`), and go on as one learner that
had pulled all slices by itself: the run is over where any shard says so, a mini-batch is rejected where any rejects it, and where
one clock is promised, those behind pull again.

No deadlock: a rank that tells waits for its group, whose ranks wait at most for answers of their own shards. Such an answer waits
for pushes of other learners' ranks of the same stage, of mini-batches before; these come after a backward pass that waits for
nothing but that learner's own group, at the same mini-batch. So waiting always leads to an earlier mini-batch.

Where gradients may be given up or dropped as a whole, the ranks tell each other once more, before the push: a notice to one of
them is one to all, and so is a stage's part of a gradient that is not finite. Nobody waits in between for anything but its group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from mpisgd.comm.communicator import Communicator, Group
from mpisgd.comm.messages import Ending, Tag
from mpisgd.exchange.base import Answers, Interrupted, Left, Report
from mpisgd.exchange.channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles


class GroupChannel(LearnerChannel):
    """A stage's end; `roles` and `slices` are what the stage sees of them.

    Args:
        group: the ranks of all stages of this learner.
        drops: a gradient that is not finite is dropped as a whole.
        leaves: tells whether this rank's stage is no more, and the learner leaves; None where nobody may.
    """

    def __init__(  # noqa: PLR0913 - each by name
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        slices: Slices,
        group: Group,
        *,
        consistent: bool,
        drops: bool = False,
        leaves: Callable[[], bool] | None = None,
        interruptible: bool = False,
    ) -> None:
        super().__init__(wire, roles, learner_id, slices, consistent=consistent, interruptible=interruptible)
        self._one_clock = consistent
        self._group = group
        self._leaves = leaves or _never
        self._agrees_on_push = drops or interruptible or leaves is not None
        self._given_up = False
        self.sleep = self._be_late

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """As a learner that pulls the slices of all stages: `clocks` has the oldest of each stage."""
        start_ns = self.now_ns()
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
        self._wait_ns, self._pull_ns = wait_ns, self.now_ns() - start_ns - wait_ns
        return Answers(oldest, stop, any(rejections))

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """As a learner's push.

        Raises Interrupted where any rank of the group has been told that the gradient comes too late, Left where any is no more.
        """
        if self._agrees_on_push:
            told = self._group.tell(Tag.WANTED, (int(self._given_up), int(self._leaves()), report.loss))
            self._given_up = False
            if any(leaves for _, leaves, _ in told):
                raise Left
            if any(given_up for given_up, *_ in told):
                raise Interrupted
            if any(math.isnan(loss) for *_, loss in told):
                report = dataclasses.replace(report, loss=math.nan)
        super().push(report, meanwhile)

    def check(self) -> None:
        """As of any learner; and this rank will say so, when its group agrees."""
        try:
            super().check()
        except Interrupted:
            self._given_up = True
            raise

    def _be_late(self, seconds: float) -> None:
        """Sleep, until a notice comes: what becomes of the gradient is said before the push."""
        with contextlib.suppress(Interrupted):
            self._wire.clock.sleep(seconds)

    def withdraw(self) -> None:
        super().withdraw()
        self._group.disband()


def _never() -> bool:
    return False
