"""Interface of a shard to `faults.py`, so that neither imports the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpisgd.comm.messages import Push, Refused, SnapshotPull
from mpisgd.records.log.writer import ShardLog
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Rules
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_server import SnapshotServer


class Gives(Protocol):
    """Giver of weights (`answering.Answering`)."""

    given: list[tuple[int, float]]
    on_given: Callable[[int], None] | None


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
    faults: Any
    """Listener to all messages."""

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
