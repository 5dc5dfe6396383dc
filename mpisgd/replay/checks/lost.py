"""A lost learner: its last gradient may have reached only some shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisgd.records.log import schema
from mpisgd.records.log.schema import LogRows, Verdict

if TYPE_CHECKING:
    from mpisgd.replay.checks.record import ShardRecord


class Lost(NamedTuple):
    """Loss of a learner; `given`: clock of its last weights."""

    clock: int
    time_s: float
    given: int


def completed(shards: list[ShardRecord]) -> list[ShardRecord]:
    """Add a lost learner's last gradient to shards without it."""
    return [_with_rows(shard, list(_missing(shard, shards))) for shard in shards]


def _missing(shard: ShardRecord, shards: list[ShardRecord]) -> Iterator[tuple[int, LogRows]]:
    for learner_id, lost in shard.lost.items():
        count = len(shard.rows_of[learner_id])
        for other in shards:
            theirs = other.rows_of[learner_id]
            if len(theirs) == count + 1:
                yield _inserted(shard, lost, other.pushes[theirs[-1] :][:1].copy())
                break


def _inserted(shard: ShardRecord, lost: Lost, row: LogRows) -> tuple[int, LogRows]:
    pushes = shard.pushes
    row["shard"], row["clock"], row["timestamp"], row["staleness"] = shard.shard, lost.clock, lost.given, lost.clock - lost.given
    row["verdict"], row["reason"], row["weight"] = Verdict.DROP, schema.Reason.TORN, 0.0
    row["arrival_s"], row["answer_s"] = lost.time_s, np.nan
    after = (pushes["clock"] > lost.clock) | ((pushes["clock"] == lost.clock) & (pushes["arrival_s"] > lost.time_s))
    return (int(np.argmax(after)) if after.any() else len(pushes)), row


def _with_rows(shard: ShardRecord, missing: list[tuple[int, np.ndarray]]) -> ShardRecord:
    found = sorted(missing, key=lambda each: each[0])
    if not found:
        return shard
    places = [at for at, _ in found]
    pushes = np.insert(shard.pushes, places, np.concatenate([row for _, row in found]))
    inserted = frozenset(at + before for before, at in enumerate(places))
    return dataclasses.replace(shard, pushes=pushes, inserted=inserted)
