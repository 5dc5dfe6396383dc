"""Check of numbers that no log can have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record, ShardRecord


def check_numbers(record: Record) -> None:
    """Raise Untrue for numbers of learners, clocks, arrivals or events that do not exist, or shards that begin at other clocks."""
    for log in record.shards:
        if log.start.clock != record.start_clock:
            other = f"shard {record.shards[0].shard} continues clock {record.start_clock}"
            refuse(f"this shard continues clock {log.start.clock}, {other}", log.shard, "updates")
        for table, name, wrong in _impossible(record, log):
            if wrong.any():
                rows, row = getattr(log, table), int(np.argmax(wrong))
                refuse(f"{name} {rows[name][row]}", log.shard, table, row=row, clock=int(rows["clock"][row]))
        _check_given_up(record, log)


def _impossible(record: Record, log: ShardRecord) -> Iterator[tuple[str, str, np.ndarray]]:
    pushes, events = log.pushes, log.events
    for table, rows, least in (("pushes", pushes, 0), ("events", events, -1)):
        yield table, "learner_id", (rows["learner_id"] < least) | (rows["learner_id"] >= record.lambda_)
        yield table, "clock", (rows["clock"] < log.start.clock) | (rows["clock"] > log.final_clock)
    yield "pushes", "timestamp", (pushes["timestamp"] < 0) | (pushes["timestamp"] > pushes["clock"])
    yield "pushes", "arrival_s", ~(np.isfinite(pushes["arrival_s"]) & (pushes["arrival_s"] >= 0))
    yield "events", "kind", ~np.isin(events["kind"], list(Event))


def _check_given_up(record: Record, log: ShardRecord) -> None:
    """Check the mini-batches that learners gave up: nobody else tells of them."""
    for row in np.flatnonzero(log.events["kind"] == Event.GAVE_UP):
        _, clock, _, learner_id, value, _ = log.events[row].tolist()
        pushed = log.rows_of[learner_id]
        if not 0 <= value <= (log.pushes["seq"][pushed[-1]] + 1 if len(pushed) else record.next_seq[learner_id]):
            refuse(f"GAVE_UP with value {value}", log.shard, "events", row=int(row), clock=clock, learner_id=learner_id)
