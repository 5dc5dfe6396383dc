"""Checks of a shard's events: computable events must occur once, others must be possible."""

from __future__ import annotations

import math

import numpy as np

from mpisgd.job.parts import budget_samples
from mpisgd.records.checkpoint.snapshots import due
from mpisgd.records.log.schema import Event
from mpisgd.records.patience import Patience
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record, ShardRecord

_OF_A_LEARNER = (
    Event.DEPARTED, Event.NONFINITE, Event.GAVE_UP, Event.LOST, Event.MISSED, Event.RETURNED, Event.STUCK, Event.PASSED,
    Event.GOODBYE,
)  # fmt: skip
_WITH_A_VALUE = (
    Event.NONFINITE, Event.GAVE_UP, Event.CHECKPOINT, Event.INTERRUPTED, Event.UNSAVED, Event.LOST, Event.MISSED, Event.REFUSED,
    Event.GOODBYE, Event.ENOUGH,
)  # fmt: skip
_WITH_NONE = frozenset(Event) - {*_WITH_A_VALUE, Event.DEPARTED, Event.RETURNED}
_GONE = (Event.DEPARTED, Event.LOST, Event.MISSED, Event.GAVE_UP)
_COMPUTED = (Event.STARTED, Event.RESUMED, Event.SNAPSHOT, Event.STOPPED)


def check_events(record: Record, shard: ShardRecord) -> None:
    """Raise Untrue at the first impossible or missing event."""
    for row, (number, clock, kind, learner_id, value, _) in enumerate(shard.events.tolist()):
        place = {"row": row, "clock": clock, "learner_id": learner_id}
        if number != shard.shard:
            refuse(f"the row says shard {number}", shard.shard, "events", **place)
        if kind not in set(Event):
            refuse(f"kind {kind}: unknown event", shard.shard, "events", **place)
        what = Event(kind).name
        of_a_learner = 0 <= learner_id < record.lambda_
        if kind != Event.REFUSED and of_a_learner != (kind in _OF_A_LEARNER):
            refuse(f"{what} of learner {learner_id}", shard.shard, "events", **place)
        if not _can_be(record, shard, kind, clock, learner_id, value):
            refuse(f"{what} with value {value}", shard.shard, "events", **place)
    _check_order(shard)
    _check_enough(record, shard)
    _check_computed(record, shard)
    _check_goodbyes(record, shard)


def _can_be(record: Record, shard: ShardRecord, kind: int, clock: int, learner_id: int, value: float) -> bool:
    if kind in _WITH_NONE:
        return math.isnan(value)
    match kind:
        case Event.DEPARTED | Event.RETURNED:  # 0 from a fault-tolerant shard
            return math.isnan(value) or value == 0
        case Event.GAVE_UP:
            rows = shard.rows_of[learner_id]
            return 0 <= value <= (shard.pushes["seq"][rows[-1]] + 1 if len(rows) else record.next_seq[learner_id])
        case Event.LOST:
            return -1 <= value <= clock
        case Event.MISSED:
            return value >= 0
    return kind != Event.ENOUGH or (_over_at(record) >= 0 and (math.isnan(value) or value == _over_at(record)))


def _over_at(record: Record) -> int:
    """Return the snapshot at which patience ended, by logged evaluations; -1 = none."""
    rows, options = record.run.evaluations, record.config.evaluation
    if not options.patience or options.judged[1] not in (rows.dtype.names or ()):
        return -1
    if record.done is not None:  # the last weights end nothing
        rows = rows[rows["snapshot"] < rows["snapshot"].max(initial=-1)]
    return Patience(options).note_all(rows).over_at


def _check_order(shard: ShardRecord) -> None:
    """Check clocks and seconds; a clock lasts from its update to the next."""
    events, first = shard.events, shard.start.clock
    done_s = np.concatenate([[shard.start.since_s], shard.updates["time_s"], [np.inf]])
    before_clock, before_s = first, 0.0
    for row, (clock, time_s) in enumerate(events[["clock", "time_s"]].tolist()):
        place = {"row": row, "clock": clock}
        if clock < before_clock or (shard.finished and clock > shard.final_clock):
            refuse(f"clock {clock}, after clock {before_clock}; the last is {shard.final_clock}", shard.shard, "events", **place)
        at = min(clock - first, len(done_s) - 2)
        if not (max(before_s, done_s[at]) <= time_s <= done_s[at + 1]):
            why = f"at {time_s} s: the event before was at {before_s} s, the clock from {done_s[at]} to {done_s[at + 1]} s"
            refuse(why, shard.shard, "events", **place)
        before_clock, before_s = clock, time_s


def _check_enough(record: Record, shard: ShardRecord) -> None:
    """Check ENOUGH: once, after its snapshot, without later answers."""
    told = np.flatnonzero(shard.events["kind"] == Event.ENOUGH)
    for row in told[1:]:
        refuse("ENOUGH: a second time", shard.shard, "events", row=int(row), clock=int(shard.events["clock"][row]))
    for row in told[:1]:
        number, over_s = shard.events[row][["value", "time_s"]].tolist()
        rows = record.run.evaluations
        taken_s = rows["taken_s"][rows["snapshot"] == number].max(initial=0.0) if shard.shard == 0 else 0.0  # by its own clock
        if over_s < taken_s:
            why = f"ENOUGH at {over_s} s: snapshot {number:g} was taken at {taken_s} s"
            refuse(why, shard.shard, "events", row=int(row), clock=int(shard.events["clock"][row]))
        for at in np.flatnonzero(shard.pushes["answer_s"] > over_s)[:1]:
            its = shard.row(int(at))
            why = f"the learner was given weights at {its.answer_s} s, after evaluations had ended training, {over_s} s"
            refuse(why, shard.shard, "pushes", row=int(at), clock=its.clock, learner_id=its.learner_id, seq=its.seq)


def due_snapshots(record: Record, shard: ShardRecord) -> list[tuple[int, int]]:
    """Return (clock, samples) of snapshots due in this attempt."""
    train_samples, every = record.environment("train_samples"), record.config.evaluation.every_epochs
    budget = budget_samples(record.config, record.protocol(), train_samples, shard.shard)
    start = shard.start
    taken = [] if record.attempt else [(start.clock, start.samples)]
    if not record.computed:
        return taken
    before = start.samples
    for clock, samples in shard.updates[["clock", "samples"]].tolist():
        if samples < budget and due(every, before / train_samples, samples / train_samples):
            taken.append((clock, samples))
        before = samples
    return taken


def _check_computed(record: Record, shard: ShardRecord) -> None:
    """Check begin, snapshots and end against updates."""
    begin = Event.RESUMED if record.attempt else Event.STARTED
    expected = [(begin, shard.start.clock), *((Event.SNAPSHOT, clock) for clock, _ in due_snapshots(record, shard))]
    budget = budget_samples(record.config, record.protocol(), record.environment("train_samples"), shard.shard)
    if len(shard.updates) and shard.updates["samples"][-1] >= budget:
        expected.append((Event.STOPPED, shard.final_clock))
    rows = np.flatnonzero(np.isin(shard.events["kind"], _COMPUTED))
    found = [(Event(kind), clock) for kind, clock in shard.events[rows][["kind", "clock"]].tolist()]
    for at in range(max(len(expected), len(found))):
        if at >= len(found):
            if shard.finished:
                kind, clock = expected[at]
                refuse(f"{kind.name} is missing", shard.shard, "events", clock=clock)
            return
        if at >= len(expected) or found[at] != expected[at]:
            kind, clock = found[at]
            wanted = f"expected {expected[at][0].name} at clock {expected[at][1]}" if at < len(expected) else "not due"
            refuse(f"{kind.name}: {wanted}", shard.shard, "events", row=int(rows[at]), clock=clock)
    stops = shard.events[shard.events["kind"] == Event.STOPPED]
    if len(stops) and stops["time_s"][0] != shard.updates["time_s"][-1]:
        why = f"the shard stopped at {stops['time_s'][0]} s, but the last update was done at {shard.updates['time_s'][-1]} s"
        refuse(why, shard.shard, "events", row=int(rows[-1]), clock=shard.final_clock)


def _check_goodbyes(record: Record, shard: ShardRecord) -> None:
    """Check pushes against learners' counts in goodbyes; older logs have none."""
    if Event.GOODBYE not in shard.events["kind"]:
        return
    for learner_id in range(record.lambda_):
        mine = shard.events_of[learner_id]
        said = mine["value"][mine["kind"] == Event.GOODBYE]
        logged = len(shard.rows_of[learner_id]) - sum(shard.pushes["learner_id"][row] == learner_id for row in shard.inserted)
        refused = int(np.count_nonzero(mine["kind"] == Event.REFUSED))
        place = {"clock": shard.final_clock, "learner_id": learner_id}
        if shard.finished and not (len(said) == 1 or (len(said) == 0 and Event.LOST in mine["kind"])):
            refuse(f"the learner said goodbye {len(said)} times", shard.shard, "events", **place)
        most = math.inf if not shard.finished else logged + refused
        if len(said) and not logged <= said[-1] <= most:
            refuse(f"the learner says {said[-1]:g} gradients pushed, but pushes has {logged}", shard.shard, "events", **place)


def check_last_answers(record: Record) -> None:
    """Raise Untrue if a learner stays, but pushes no more after answers of all shards."""
    if not record.whole or (len(record.shards) > 1 and record.protocol().consistent):
        return
    for learner_id in range(record.lambda_):
        last = [rows.rows_of[learner_id][-1:] for rows in record.shards]
        if not all(len(each) for each in last):
            continue
        gone = any(np.isin(shard.events_of[learner_id]["kind"], _GONE).any() for shard in record.shards)
        answers = [shard.pushes["answer_s"][each[0]] for shard, each in zip(record.shards, last, strict=True)]
        if not gone and not np.isnan(answers).any():
            row = int(last[0][0])
            why = f"the learner was given weights after this push, at {answers[0]} s, and pushed nothing more"
            refuse(why, record.shards[0].shard, "pushes", row=row, clock=record.shards[0].row(row).clock, learner_id=learner_id)
