"""Membership at a fault-tolerant shard under a coordinator, which decides on all pushes.

A learner owes a shard nothing during evaluations, and after the last command a goodbye: without it, the learner is lost. A push
torn, or missing on another shard, is in no sum.
"""

from __future__ import annotations

import math

from mpisgd.comm.messages import Message
from mpisgd.records.log.schema import Event
from mpisgd.serving.fault_tolerant import FaultTolerant

_PATIENCES = 2
"""Waits for a goodbye, in `patience_s`: a shard may wait for a hung learner, and all others for that shard."""


class Membership(FaultTolerant):
    def begin(self) -> None:
        self.look_s = math.inf

    def end_of_commands(self) -> None:
        """Wait for goodbyes."""
        super().begin()

    def _hear_from(self, message: Message) -> None:
        """Do nothing: no debt."""

    def look(self, whose: int | None) -> None:
        now_s = self._channel.now_s()
        self.look_s = now_s + self._patience_s / 4
        for learner_id in sorted(self._rules.present):
            if now_s - self._since_s[learner_id] > _PATIENCES * self._patience_s:
                self._lose_for_good(self._channel.rank_of(learner_id), learner_id)
                self._tell_given_up(learner_id)
        self._look_for_life()

    def _unstick(self, rank: int, learner_id: int) -> None:
        """Log a stuck transfer; the coordinator goes on."""
        if learner_id in self._rules.present:
            self._shard.log.event(Event.STUCK, self._rules.clock, self._channel.now_s(), learner_id)
        else:
            super()._unstick(rank, learner_id)


class Given:
    """Clock of each learner's last weights; -1 = none."""

    def __init__(self, lambda_: int) -> None:
        self.given = [(-1, 0.0)] * lambda_
