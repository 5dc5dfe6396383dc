"""A rank's end in a group: push and pull of its stage's slices, and agreement of the group [Dean12 3].

Shards of different stages decide independently (law 2), so ranks exchange all answers: any shard may end the run or reject the
mini-batch, and where the same clock is promised, lagging ranks pull again. Where gradients may be given up or dropped whole, ranks
also agree before the push. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from mpisgd.comm.communicator import Communicator, Group
from mpisgd.comm.messages import Ending, Tag
from mpisgd.exchange.exchange import Answers, Interrupted, Left, Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles


class GroupChannel(LearnerChannel):
    """A stage's end; `roles` and `slices` are the stage's view.

    Args:
        drops: non-finite gradients are dropped whole.
        leaves: whether this rank's stage is lost, and its learner leaves; None where impossible.
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

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Pull; `clocks` has the oldest of each stage."""
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
        """Push once the group agrees. Raises Interrupted: any rank had notice of a late gradient; Left: any stage is lost."""
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
        """Check, and note an interrupt for the group's agreement."""
        try:
            super().check()
        except Interrupted:
            self._given_up = True
            raise

    def sleep(self, seconds: float) -> None:
        """Sleep until a notice; the group agrees on it before the push."""
        with contextlib.suppress(Interrupted):
            super().sleep(seconds)

    def withdraw(self) -> None:
        super().withdraw()
        self._group.disband()


def _never() -> bool:
    return False
