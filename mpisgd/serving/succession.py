"""Who evaluates, where learners and the evaluator may be lost: shard 0 decides.

A dedicated evaluator does it while it lives. Otherwise, and after that, it is the first learner that has said goodbye; where that
is lost too, the next. So the weights of a run that has come to its end are evaluated and saved as long as anybody is left.
"""

from __future__ import annotations

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import NOTHING_MORE
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.rules.attendance import Attendance
from mpisgd.serving.snapshot_desk import SnapshotDesk

DEDICATED = -1
"""Stands for the evaluator that is no learner."""


class Succession:
    """The evaluator, and those who are free to follow.

    Attributes:
        evaluator: the learner that evaluates, or DEDICATED; None = nobody does.
    """

    def __init__(self, channel: TolerantShardChannel, desk: SnapshotDesk, attendance: Attendance) -> None:
        self.evaluator: int | None = DEDICATED if channel.dedicated_rank >= 0 else None
        self._channel = channel
        self._desk = desk
        self._attendance = attendance
        self._free: list[int] = []
        """Learners that have said goodbye, and wait to be told whether they are to evaluate."""
        self._appointed = 0
        """How many were appointed so far."""

    @property
    def is_open(self) -> bool:
        """Whether there is, or may come, something to evaluate."""
        return self._desk.is_open

    def is_last(self, rank: int) -> bool:
        """Whether a rank evaluates, and nobody is left who could follow it."""
        return rank == self._channel.evaluator_rank and self._attendance.deserted and not self._free

    def lost(self, learner_id: int) -> None:
        """A learner, or the DEDICATED evaluator, is there no more."""
        if learner_id == self.evaluator:
            self.evaluator = None
        if learner_id in self._free:
            self._free.remove(learner_id)

    def has_parted(self, learner_id: int) -> None:
        """A learner has left in order, and asks whether it is to evaluate."""
        if self._desk.is_open:
            self._free.append(learner_id)
            self.appoint()
        else:
            self._channel.answer_goodbye(learner_id, 0)

    def appoint(self) -> None:
        """See to it that somebody evaluates. Raises PeerError where nobody is left."""
        if not self.is_open or self.evaluator is not None:
            return
        if self._free:
            self.evaluator = min(self._free)
            self._appointed += 1
            self._free.remove(self.evaluator)
            self._channel.answer_goodbye(self.evaluator, self._appointed)
        elif self._attendance.deserted:
            raise PeerError("no rank is left to evaluate and to save the weights")

    def close(self) -> None:
        """All was evaluated."""
        self._desk.ask(NOTHING_MORE)
        self._channel.pass_on_nothing_more()
        for learner_id in self._free:
            self._channel.answer_goodbye(learner_id, 0)
        self._free.clear()
