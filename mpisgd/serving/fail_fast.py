"""Learners of a fail-fast shard: all are there until they leave. `fault_tolerant.py` has the other kind."""

from __future__ import annotations

import math
from typing import Protocol

from mpisgd.comm.messages import Message, Push, Refused, SnapshotPull
from mpisgd.records.log.writer import ShardLog
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Rules
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_server import SnapshotServer


class Gives(Protocol):
    """Giver of weights (`answering.Answering`)."""

    given: list[tuple[int, float]]


class Serves(Protocol):
    """A shard (`shard.Shard`)."""

    rules: Rules
    log: ShardLog

    @property
    def answering(self) -> Gives: ...

    snapshot_server: SnapshotServer
    refusals: Refusals
    received: list[int]
    pushed: list[int]

    def settle(self) -> None:
        """Make due updates."""

    def tear(self, push: Push) -> None:
        """Take a push with part of its gradient."""

    def go_on_without(self, learner_id: int, gone: Gone) -> None:
        """Go on without a lost or missed learner."""

    def end_if_deserted(self) -> None:
        """End if all learners have left."""

    def see_enough(self, asked: SnapshotPull) -> None:
        """End training if the evaluator says so."""

    def refuse(self, refused: Refused) -> None:
        """Refuse an impossible message."""


class FailFast:
    """Presence of a shard's learners; the death of any ends the job elsewhere (`liveness/`).

    Attributes:
        look_s: second of the next `look`.
    """

    tolerant = False
    look_s = math.inf

    @property
    def evaluates(self) -> bool:
        """This rank evaluates, once all learners have left."""
        return False

    def attend(self, shard: Serves) -> None:
        """Act on this shard from now on."""

    def begin(self) -> None:
        """Begin to watch."""

    def hear(self, message: Message) -> bool:
        """Take a message; return whether it is done with."""
        return False

    def look(self, whose: int | None) -> None:
        """Look for overdue learners; `whose`: the only learner waited for."""

    def note_given(self, learner_id: int) -> None:
        """Note weights given to a learner."""

    def note_if_back(self, learner_id: int) -> None:
        """Note a push of a missed learner."""

    def note_if_alone(self, learner_id: int) -> None:
        """Note a waiting pull."""

    def note_if_passed(self, learner_id: int, min_clock: int) -> None:
        """Note a pull, answered or not."""

    def note_who_passes(self) -> None:
        """Check waiting pulls after a departure."""

    def end_of_commands(self) -> None:
        """Note a coordinator's last command."""

    def end(self) -> None:
        """Lose all missed learners."""


FAIL_FAST = FailFast()
