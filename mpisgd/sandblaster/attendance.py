"""What a fault-tolerant shard under a coordinator hears of learners: the coordinator says whose pushes count, and until when.

So a learner owes a shard nothing while evaluations are made, and a push that was torn, or that not all shards have, is in no sum.
When there are no more commands each learner owes a goodbye: one that does not say it in time is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpisgd.comm.messages import Message
from mpisgd.records.log.schema import Event
from mpisgd.serving.faults import Faults

_PATIENCES = 2
"""In which a goodbye has come: some shard may have waited for one that hangs, and all others for that shard."""


class Attendance(Faults):
    """The presence of one shard's learners."""

    def begin(self) -> None:
        self.look_s = math.inf

    def end_of_commands(self) -> None:
        """From now on goodbyes are waited for."""
        super().begin()

    def _hear_from(self, message: Message) -> None:
        """It owes nothing."""

    def _given(self, learner_id: int) -> None:
        """It owes nothing."""

    def look(self, whose: int | None) -> None:
        now_s = self._channel.now_s()
        self.look_s = now_s + self._patience_s / 4
        for learner_id in sorted(self._rules.present):
            if now_s - self._since_s[learner_id] > _PATIENCES * self._patience_s:
                self._lose_for_good(self._channel.rank_of(learner_id), learner_id)
                self._channel.tell_given_up(learner_id)
        self._look_for_life()

    def _unstick(self, rank: int, learner_id: int) -> None:
        """Whom the coordinator waits for too long, it goes on without."""
        if learner_id in self._rules.present:
            self._shard.log.event(Event.STUCK, self._rules.clock, self._channel.now_s(), learner_id)
        else:
            super()._unstick(rank, learner_id)


class Given:
    """The clock of the weights that each learner was given last, and -1 before: what `Faults` asks of `serving.answering`."""

    def __init__(self, lambda_: int) -> None:
        self.given = [(-1, 0.0)] * lambda_
        self.on_given: Callable[[int], None] | None = None
