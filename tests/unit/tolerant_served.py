"""A shard that tolerates deaths, before scripted learners: what the tests of it share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.comm.messages import FINAL, NOTHING_MORE, Goodbye, Message, Pull, SnapshotPull
from mpisgd.config import SgdOptions
from mpisgd.protocols import (
    HardsyncOptions,
    ProtocolOptions,
)
from mpisgd.records.checkpoint.snapshots import Snapshots, Taken
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.schema import Event
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.shard import Shard
from mpisgd.update.slice_update import SliceUpdate
from tests.unit.fakes import ScriptedChannel, push, tensor

PATIENCE_S = 100.0
LATER_NS = 10**12
"""So long after the start that who was heard of then is not overdue."""
EVALUATOR, SHARD_0 = 9, 10
LEAVE = SnapshotPull(NOTHING_MORE)


class Channel(ScriptedChannel):
    """This shard is rank 0, learner l rank l + 1, the evaluator at first rank 9. Where the script has no message, time passes."""

    evaluator_rank = EVALUATOR
    first_rank = SHARD_0
    is_first = False

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.given_up: list[int] = []
        self.told: list[int] = []
        self.passed_on = 0
        self.hang: set[int] = set()
        """Ranks that give no sign of life."""
        self.asked: set[int] = set()
        """Who was ever asked for one."""

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        message = super().receive(gradient, learner_id, until_s)
        if message is None:
            self.seconds += 2 * PATIENCE_S
        return message

    @property
    def evaluates(self) -> bool:
        return self.is_first and self.evaluator_rank == 0

    def lose_evaluator(self) -> None:
        self.evaluator_rank = 0

    def pass_on_nothing_more(self) -> None:
        self.passed_on += 1

    def give_up(self, rank: int) -> None:
        self.given_up.append(rank)

    def give_up_learner(self, learner_id: int) -> None:
        self.give_up(self.rank_of(learner_id))

    def tell_given_up(self, learner_id: int) -> None:
        self.told.append(learner_id)

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        asked = frozenset(ranks)
        self.asked |= asked
        return asked & self.hang

    def rank_of(self, learner_id: int) -> int:
        return learner_id + 1

    def learner_of(self, rank: int) -> int:
        return -1 if rank == EVALUATOR else rank - 1

    def ranks_of(self, learner_id: int) -> tuple[int, ...]:
        return (self.rank_of(learner_id),)


class Served:
    """A shard of one weight, at 0, plain SGD of rate 1, two samples in a push; what was left when everybody had gone."""

    def __init__(
        self, path: Path, channel: Any, options: ProtocolOptions, lambda_: int, budget: float, *, first: bool, size: int = 1
    ) -> None:
        zeros = tensor(*[0.0] * size)
        update = SliceUpdate(zeros, SgdOptions(momentum=0.0), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=4)
        snapshots = Snapshots(path.with_suffix(".snapshots"), every_epochs=0.0, vectors=1, size=size)
        log = ShardLog(TableFile(path, shard=0, flush_rows=100, flush_s=1e9), 0)
        self.shard = shard = Shard(
            channel,
            Rules(options.make(lambda_), lambda_, budget),
            update,
            ShardRecords(log, Progress("off", 1.0, 1.0), snapshots),
            nonfinite="stop",
            presence=FaultTolerant(channel, channel, lambda_, PATIENCE_S, "shard 0"),
        )
        channel.is_first = first
        self.evaluated: list[Taken] = []
        """The last weights, if they were evaluated on this rank."""
        try:
            shard.serve(self._evaluate)
        finally:
            snapshots.close()
        self.path = path
        self.answers = channel.answers
        self.channel = channel

    def _evaluate(self) -> None:
        self.evaluated.append(self.shard.snapshot(FINAL))
        self.shard.end_evaluation()

    def rows(self, table: str, *columns: str) -> list[Any]:
        rows: list[Any] = read_table(self.path, table)[list(columns)].tolist()
        return rows

    @property
    def weights(self) -> list[float]:
        weights: list[float] = self.shard.update.weights.tolist()
        return weights

    def told(self, *kinds: Event) -> list[tuple[int, int, int]]:
        """(kind, clock, learner_id) of events."""
        return [row for row in self.rows("events", "kind", "clock", "learner_id") if row[0] in kinds]

    def balanced(self) -> bool:
        summary = read_summary(self.path)[0]
        return int(summary["received"]) == int(summary["pushed"]) == len(read_table(self.path, "pushes"))


def serve(
    log: Path, script: list[Any], options: ProtocolOptions | None = None, lambda_: int = 3, budget: float = 4, first: bool = False
) -> Served:
    return Served(log, Channel(script), options or HardsyncOptions(), lambda_, budget, first=first)


def pulls(*learner_ids: int, clock: int = 0) -> list[Pull]:
    return [Pull(learner_id, clock) for learner_id in learner_ids]


def now(learner_id: int, timestamp: int = 0, seq: int = -1) -> Any:
    """A push that has just come."""
    return push(learner_id, timestamp, seq, arrival_ns=LATER_NS)


def byes(**pushed: int) -> list[Any]:
    return [*(Goodbye(int(name[1:]), count, True) for name, count in pushed.items()), LEAVE]
