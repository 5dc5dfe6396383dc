"""What a shard is to who hears of the faults of its run (`faults.py`): an interface, so that neither imports the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpisgd.comm.messages import Push, Refused, SnapshotPull
from mpisgd.records.log.writer import ShardLog
from mpisgd.rules.attendance import Gone
from mpisgd.rules.rules import Rules
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_desk import SnapshotDesk


class Gives(Protocol):
    """Where weights are given (`answering.Answering`)."""

    given: list[tuple[int, float]]
    on_given: Callable[[int], None] | None


class Serves(Protocol):
    """What is asked and told of the shard (`shard.Shard`)."""

    rules: Rules
    log: ShardLog

    @property
    def answering(self) -> Gives: ...

    desk: SnapshotDesk
    refusals: Refusals
    received: list[int]
    pushed: list[int]
    faults: Any
    """Whom it tells of all that comes."""

    def settle(self) -> None:
        """Make the updates that are due."""

    def tear(self, push: Push) -> None:
        """Of a gradient only a part has come."""

    def go_on_without(self, learner_id: int, gone: Gone) -> None:
        """A learner is lost, or missed."""

    def end_if_deserted(self) -> None:
        """All learners may have left."""

    def see_enough(self, asked: SnapshotPull) -> None:
        """The evaluator may say that training is to end."""

    def refuse(self, refused: Refused) -> None:
        """What a rank has sent cannot be."""
