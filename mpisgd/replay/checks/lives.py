"""Who was a learner, one rank after the other: the first, and spares that took its place; and what each of them left undone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, LogRows, Verdict

if TYPE_CHECKING:
    from mpisgd.replay.checks.record import ShardRecord


class Lost(NamedTuple):
    """A learner was lost; it had been given weights of clock `given` last."""

    clock: int
    time_s: float
    given: int


class Life(NamedTuple):
    """One rank that was a learner, on one shard: the first, or a spare that took its place.

    Attributes:
        rank: of the spare; -1 = the first.
        since_s: what has arrived later is the spare's.
        lost: how it ended, where the shard says so.
    """

    rank: int
    since_s: float
    lost: Lost | None


def lives(shard: ShardRecord, learner_id: int) -> list[Life]:
    """Who was this learner, in order."""
    found = [Life(-1, -math.inf, None)]
    for kind, clock, time_s, value in shard.events_of[learner_id][["kind", "clock", "time_s", "value"]].tolist():
        if kind == Event.SUCCEEDED:
            found.append(Life(int(value), time_s, None))
        elif kind == Event.LOST:
            found[-1] = found[-1]._replace(lost=Lost(clock, time_s, int(value)))
    return found


def rows_of_lives(shard: ShardRecord, learner_id: int) -> list[LogRows]:
    """The numbers of the rows of each of `lives`."""
    rows = shard.rows_of[learner_id]
    since_s = [life.since_s for life in lives(shard, learner_id)]
    of_life = np.searchsorted(since_s, shard.pushes["arrival_s"][rows], side="left") - 1
    return [rows[of_life == number] for number in range(len(since_s))]


def firsts_of_spares(shard: ShardRecord) -> set[tuple[int, int]]:
    """(learner_id, number) of the first gradients of spares that have taken a learner's place, of a shard that is completed."""
    found = set[tuple[int, int]]()
    if Event.SUCCEEDED in shard.events["kind"]:
        for learner_id in range(shard.lambda_):
            counts = np.cumsum([len(rows) for rows in rows_of_lives(shard, learner_id)])
            found |= {(learner_id, int(number)) for number in counts[:-1]}
    return found


def completed(shards: list[ShardRecord]) -> list[ShardRecord]:
    """The last gradient of a learner that was lost may have come to some shards and not to others: these are given a row of it.

    So all shards have the same pushes of each learner, and know from which weights each was computed.
    """
    return [
        _with_rows(shard, [row for learner_id in shard.lost for row in _missing(shard, shards, learner_id)]) for shard in shards
    ]


def _missing(shard: ShardRecord, shards: list[ShardRecord], learner_id: int) -> Iterator[tuple[int, LogRows]]:
    """Find, for each rank that was this learner and is lost, where a row is to be inserted, and the row, if any shard has more than
    this one."""
    others = [
        {life.rank: rows for life, rows in zip(lives(each, learner_id), rows_of_lives(each, learner_id), strict=True)}
        for each in shards
    ]
    for life, rows in zip(lives(shard, learner_id), rows_of_lives(shard, learner_id), strict=True):
        for other, theirs in zip(shards, others, strict=True):
            more = theirs.get(life.rank, rows)
            if life.lost is not None and len(more) == len(rows) + 1:
                yield _inserted(shard, life.lost, other.pushes[more[-1] :][:1].copy())
                break


def _inserted(shard: ShardRecord, lost: Lost, row: LogRows) -> tuple[int, LogRows]:
    """Make of another shard's row one of this shard, and find its place."""
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
