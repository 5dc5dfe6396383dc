"""A shard before scripted learners, and what is left of it: what the tests of its loop share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.comm.messages import NOTHING_MORE, Ending, Goodbye, Pull, SnapshotPull
from mpisgd.config import SgdOptions
from mpisgd.protocols import (
    ProtocolOptions,
)
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.update.average import Average
from mpisgd.update.slice_update import SliceUpdate
from tests.unit.fakes import Crew, ScriptedChannel, tensor

LEAVE = SnapshotPull(NOTHING_MORE)
EVERYBODY = (0, 1, 2)


@dataclass
class Served:
    """What was left when everybody had gone."""

    shard: Shard
    answers: list[tuple[Any, ...]]
    path: Path

    def rows(self, table: str, *columns: str) -> list[Any]:
        rows: list[Any] = read_table(self.path, table)[list(columns)].tolist()
        return rows

    @property
    def weights(self) -> list[float]:
        weights: list[float] = self.shard.update.weights.tolist()
        return weights

    @property
    def summary(self) -> tuple[Any, ...]:
        return tuple(read_summary(self.path)[0].tolist())


def make(path: Path, channel: ScriptedChannel, options: ProtocolOptions, lambda_: int, **fields: Any) -> tuple[Shard, Snapshots]:
    """A shard of one weight that begins at 0, plain SGD of rate 1, two samples in a push, four in an epoch."""
    given = {"budget": 10**6, "nonfinite": "stop", "every_epochs": 0.0, "averaging": 0.0, "timeout_s": math.inf, **fields}
    weights = tensor(*[0.0] * given.get("weights", 1))
    update = SliceUpdate(
        weights,
        SgdOptions(momentum=0.0),
        learning_rate=1.0,
        schedule=lambda _: 1.0,
        train_samples=4,
        average=Average.of(weights, given["averaging"]),
    )
    snapshots = Snapshots(
        path.with_suffix(".snapshots"),
        every_epochs=given["every_epochs"],
        vectors=1 + (given["averaging"] > 0),
        size=given.get("weights", 1),
    )
    shard = Shard(
        channel,  # type: ignore[arg-type]
        Rules(options.make(lambda_), lambda_, given["budget"]),
        update,
        ShardRecords(ShardLog(TableFile(path, shard=0, flush_rows=100, flush_s=1e9), 0), Progress("off", 1.0, 1.0), snapshots),
        nonfinite=given["nonfinite"],
        timeout_s=given["timeout_s"],
    )
    return shard, snapshots


def serve(path: Path, script: Sequence[Any] | Crew, options: ProtocolOptions, lambda_: int, **fields: Any) -> Served:
    channel = script if isinstance(script, ScriptedChannel) else ScriptedChannel(script)
    shard, snapshots = make(path, channel, options, lambda_, **fields)
    shard.serve()
    snapshots.close()
    return Served(shard, channel.answers, path)


def pulls(*learner_ids: int, clock: int = 0) -> list[Pull]:
    return [Pull(learner_id, clock) for learner_id in learner_ids]


def byes(pushed: dict[int, int], ending: Ending = Ending.FINISHED) -> list[Any]:
    return [*(Goodbye(learner_id, count, ending) for learner_id, count in pushed.items()), LEAVE]
