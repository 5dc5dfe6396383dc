"""Comparison of shards' logs: all shards get a push with the same header, but for the timestamp."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from mpisgd.protocols import Protocol
from mpisgd.records.log import schema
from mpisgd.records.log.schema import LogRows
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record, ShardRecord
from mpisgd.rules.verdict import Kind

#: Columns equal on all shards.
TOLD = ("seq", "samples", "gradients", "loss", "compute_s", "delay_s", "push_s", "wait_s", "pull_s", "rounded")
#: Exceptions if slices are exchanged singly.
OWN = ("compute_s", "delay_s", "rounded")
#: Exceptions if each stage of the model has a rank.
OF_STAGES = (*OWN, "push_s", "wait_s", "pull_s")


def compare_shards(record: Record) -> None:
    """Raise Untrue if shards disagree on a gradient, or its weights or mini-batch were not asked for."""
    protocol = record.protocol()
    for learner_id in range(record.lambda_):
        _check_told(record, learner_id)
        _check_asked(record, learner_id, protocol)


def _check_told(record: Record, learner_id: int) -> None:
    first, config = record.shards[0], record.config
    own: tuple[str, ...] = OF_STAGES if config.in_groups else OWN if config.by_layers else ()
    own = (*own, "neighbour_s")
    extra = {name for shard in record.shards for name in schema.extra(shard.pushes.dtype)}
    told = [name for name in (*TOLD, *sorted(extra)) if name not in own]
    for other in record.shards[1:]:
        ours, theirs = (shard.pushes[shard.rows_of[learner_id]] for shard in (first, other))
        both = min(len(ours), len(theirs))
        wrong = {name: number for name in told if (number := _first_other(ours[name][:both], theirs[name][:both])) is not None}
        if wrong:
            name = min(wrong, key=lambda name: wrong[name])
            number = wrong[name]
            row = first.rows_of[learner_id][number]
            _refuse(other, learner_id, number, f"{name} {theirs[name][number]}; row {row} of shard 0 says {ours[name][number]}")
        if record.whole and len(ours) != len(theirs):
            more, fewer = (first, other) if len(ours) > len(theirs) else (other, first)
            _refuse(more, learner_id, both, f"shard {fewer.shard} has no row of this gradient")


def _first_other(ours: LogRows, theirs: LogRows) -> int | None:
    other = np.flatnonzero((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)))
    return int(other[0]) if len(other) else None


def _check_asked(record: Record, learner_id: int, protocol: Protocol) -> None:
    """Check that consistent protocols use equal clocks, and all protocols the next clock or later."""
    numbers = min(len(shard.rows_of[learner_id]) for shard in record.shards)
    timestamp, answer_s, verdict, seq = (
        np.array([shard.pushes[name][shard.rows_of[learner_id][:numbers]] for shard in record.shards])
        for name in ("timestamp", "answer_s", "verdict", "seq")
    )  # each (shards, numbers)
    if protocol.consistent:
        for shard, number in _places(timestamp != timestamp[:1]):
            clocks = ", ".join(str(clock) for clock in timestamp[:, number])
            _refuse(record.shards[shard], learner_id, number, f"timestamps {clocks} on the shards: expected the same on all")
    least = np.array([protocol.next_clock(clock) for clock in timestamp.min(axis=0)[:-1].tolist()], np.int64)
    pulled = ~np.isnan(answer_s).any(axis=0)[:-1]
    for shard, number in _places((timestamp[:, 1:] < least) & pulled):
        why = f"timestamp {timestamp[shard, number + 1]}: the mini-batch before asked for clock {least[number]} or later"
        _refuse(record.shards[shard], learner_id, number + 1, why)
    rejected = (verdict == Kind.REJECT).any(axis=0)[:-1]
    for shard, number in _places((seq[:, 1:] == seq[:, :-1]) & ~rejected):
        _refuse(record.shards[shard], learner_id, number + 1, "the same mini-batch again, rejected by no shard")


def _places(wrong: np.ndarray) -> list[tuple[int, int]]:
    """Return (shard, number) of the first wrong number."""
    numbers = np.flatnonzero(wrong.any(axis=0))
    return [(int(np.argmax(wrong[:, numbers[0]])), int(numbers[0]))] if len(numbers) else []


def _refuse(shard: ShardRecord, learner_id: int, number: int, why: str) -> NoReturn:
    at = int(shard.rows_of[learner_id][number])
    row = shard.row(at)
    refuse(why, shard.shard, "pushes", row=at, clock=row.clock, learner_id=learner_id, seq=row.seq)
