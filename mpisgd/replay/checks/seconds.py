"""Checks of seconds: not computable again, but consecutive, with delays drawn by name, and the same on all shards.

A row lies in its clock's time. A learner does a single thing at a time: its seconds fit between the shards' news of it. The first
pull is left out: clocks wait for each other there.
"""

from __future__ import annotations

import math

import numpy as np

from mpisgd.gradient.straggler import Delays
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, LogRows, Reason
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record, ShardRecord

_DRIFT = 1e-3
_SLACK_S = 1e-6
_SPENT = ("compute_s", "delay_s", "push_s", "wait_s", "pull_s")
_NEIGHBOURS = "neighbour_s"


def check_seconds(record: Record) -> None:
    """Raise Untrue at the first impossible seconds of an attempt."""
    for shard in record.shards:
        _check_shard(record, shard)
    for shard in record.shards[1:]:
        _check_told(record, shard)


def _check_shard(record: Record, shard: ShardRecord) -> None:
    _check_updates(shard)
    _check_floats(record, shard)
    _check_arrivals(record, shard)
    _check_events(record, shard)
    for learner_id, rows in enumerate(shard.rows_of):
        if len(rows):
            _check_answers(record, shard, rows)
            _check_spent(shard, rows, ahead=record.config.in_buckets and learner_id != shard.shard)
            _check_delays(record, shard, learner_id, rows)


def _check_updates(shard: ShardRecord) -> None:
    times, spent = shard.updates["time_s"], shard.updates["update_s"]
    for row in np.flatnonzero(~(np.diff(times, prepend=0.0) >= 0))[:1]:
        before = f"the previous update at {times[row - 1]} s" if row else "the start"
        why = f"done at {times[row]} s, before {before}"
        refuse(why, shard.shard, "updates", row=int(row), clock=shard.start.clock + int(row) + 1)
    between = np.diff(times, prepend=shard.start.since_s)
    wrong = np.flatnonzero(~((spent >= 0) & (spent <= _most(between))))
    if len(wrong):
        row = int(wrong[0])
        why = f"the update took {spent[row]} s, but was done {between[row]} s after the update before, or the start"
        refuse(why, shard.shard, "updates", row=row, clock=shard.start.clock + row + 1)


def _clock_times(shard: ShardRecord, clocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the begin and the end of clocks, in seconds; the last clock has no end."""
    times = np.concatenate(([shard.start.since_s], shard.updates["time_s"], [np.inf]))
    at = np.minimum(clocks - shard.start.clock, len(shard.updates))
    return times[at], times[at + 1]


def _check_arrivals(record: Record, shard: ShardRecord) -> None:
    """Check that pushes arrive before the clock's end, and in order, unless learners take turns."""
    arrivals = shard.pushes["arrival_s"]
    begun_s, done_s = _clock_times(shard, shard.pushes["clock"])
    for row in np.flatnonzero(arrivals > done_s)[:1]:
        _refuse(shard, int(row), f"the push arrived at {arrivals[row]} s, after the next update was done, {done_s[row]} s")
    if record.protocol().ordered:
        return
    waited = (shard.pushes["reason"] == Reason.FINISHED) & shard.enough  # until the end
    came = np.flatnonzero(~waited)
    before_s = np.maximum(begun_s[came], np.concatenate(([0.0], np.maximum.accumulate(arrivals[came])[:-1])))
    for at in np.flatnonzero(~(arrivals[came] >= before_s))[:1]:
        why = f"the push arrived at {arrivals[came[at]]} s, before the entry above in the log, {before_s[at]} s"
        _refuse(shard, int(came[at]), why)


def _check_answers(record: Record, shard: ShardRecord, rows: LogRows) -> None:
    """Check that weights were given at their clock, after the push and before the next."""
    pushes = shard.pushes[rows]
    least = shard.start.clock + np.searchsorted(shard.updates["time_s"], pushes["answer_s"], side="left")
    most = shard.start.clock + np.searchsorted(shard.updates["time_s"], pushes["answer_s"], side="right")
    told, following = ~np.isnan(pushes["answer_s"][:-1]), pushes["timestamp"][1:]
    wrong = told & ((following < least[:-1]) | ((following > most[:-1]) & (not record.protocol().consistent)))
    for at in np.flatnonzero(wrong)[:1]:
        given = f"clock {least[at]}" if least[at] == most[at] else f"clocks {least[at]} to {most[at]}"
        why = f"the learner got the weights of {given} at {pushes['answer_s'][at]} s, row {rows[at]} says"
        _refuse(shard, int(rows[at + 1]), f"timestamp {following[at]}: {why}")
    for at in np.flatnonzero(told & (pushes["arrival_s"][1:] < pushes["answer_s"][:-1]))[:1]:
        said, given = pushes["arrival_s"][at + 1], pushes["answer_s"][at]
        _refuse(shard, int(rows[at + 1]), f"the push arrived at {said} s, before the weights were given, {given} s")


def _check_events(record: Record, shard: ShardRecord) -> None:
    """Check that events lie in their clock's time, in order; time-outs after the wait; nothing is given after the end."""
    events = shard.events
    begun_s, done_s = _clock_times(shard, events["clock"])
    before_s = np.maximum(begun_s, np.concatenate(([0.0], events["time_s"][:-1])))
    for row in np.flatnonzero(~((before_s <= events["time_s"]) & (events["time_s"] <= done_s)))[:1]:
        why = f"at {events['time_s'][row]} s, expected {before_s[row]} to {done_s[row]} s: the event before, and the next update"
        refuse(why, shard.shard, "events", row=int(row), clock=int(events["clock"][row]))
    wait_s = record.config.protocol.deadline_s
    for row in np.flatnonzero((events["kind"] == Event.TIMEOUT) & (events["time_s"] < begun_s + wait_s))[:1]:
        why = f"a time-out at {events['time_s'][row]} s, expected {begun_s[row] + wait_s} s or later"
        refuse(why, shard.shard, "events", row=int(row), clock=int(events["clock"][row]))
    for row in np.flatnonzero((events["kind"] == Event.STOPPED) & (events["time_s"] != begun_s) & (len(shard.updates) > 0))[:1]:
        why = f"the shard stopped at {events['time_s'][row]} s, but the last update was done at {begun_s[row]} s"
        refuse(why, shard.shard, "events", row=int(row), clock=int(events["clock"][row]))
    for row in np.flatnonzero(events["kind"] == Event.ENOUGH)[:1]:
        _check_enough(record, shard, int(row))


def _check_enough(record: Record, shard: ShardRecord, row: int) -> None:
    """Check that evaluations ended training after their snapshot, and nothing was given later."""
    number, over_s = shard.events[row][["value", "time_s"]].tolist()
    rows = record.run.evaluations
    taken_s = rows["taken_s"][rows["snapshot"] == number].max(initial=0.0) if shard.shard == 0 else 0.0  # by its own clock
    if over_s < taken_s:
        why = f"ENOUGH at {over_s} s: snapshot {number:g} was taken at {taken_s} s"
        refuse(why, shard.shard, "events", row=row, clock=int(shard.events["clock"][row]))
    for at in np.flatnonzero(shard.pushes["answer_s"] > over_s)[:1]:
        answer_s = shard.pushes["answer_s"][at]
        why = f"the learner was given weights at {answer_s} s, after evaluations had ended training, {over_s} s"
        _refuse(shard, int(at), why)


def _check_told(record: Record, shard: ShardRecord) -> None:
    """Check that a push tells all shards the same seconds, but for slices exchanged singly, and stages."""
    config, first = record.config, record.shards[0]
    own = _SPENT if config.in_groups else _SPENT[:2] if config.per_layer else ()
    for learner_id in range(record.lambda_):
        ours, theirs = (each.pushes[each.rows_of[learner_id]] for each in (first, shard))
        both = min(len(ours), len(theirs))
        for name in (name for name in _SPENT if name not in own):
            for at in np.flatnonzero(ours[name][:both] != theirs[name][:both])[:1]:
                row = first.rows_of[learner_id][at]
                why = f"{name} {theirs[name][at]}; row {row} of shard 0 says {ours[name][at]}"
                _refuse(shard, int(shard.rows_of[learner_id][at]), why)


def _most(elapsed: np.ndarray) -> np.ndarray:
    """Return the most seconds spent during `elapsed` elsewhere."""
    most: np.ndarray = elapsed * (1 + _DRIFT) + _SLACK_S
    return most


def _check_floats(record: Record, shard: ShardRecord) -> None:
    if record.config.push_format == "float32" and (wrong := np.flatnonzero(shard.pushes["rounded"] != 0)).size:
        _refuse(shard, int(wrong[0]), f"rounded {shard.pushes['rounded'][wrong[0]]}: gradients were pushed as float32")
    behind = schema.backward_s(shard.pushes)
    for name in _spent(shard.pushes):
        if (wrong := np.flatnonzero(~(shard.pushes[name] >= 0))).size:
            _refuse(shard, int(wrong[0]), f"{name} {shard.pushes[name][wrong[0]]}")
    if (wrong := np.flatnonzero(~((behind >= 0) & (behind <= shard.pushes["compute_s"])))).size:
        _refuse(shard, int(wrong[0]), f"backward_s {behind[wrong[0]]}, compute_s {shard.pushes['compute_s'][wrong[0]]}")


def _spent(pushes: LogRows) -> tuple[str, ...]:
    return (*_SPENT, _NEIGHBOURS) if _NEIGHBOURS in (pushes.dtype.names or ()) else _SPENT


def _check_spent(shard: ShardRecord, rows: LogRows, *, ahead: bool) -> None:
    """Check that computing fits between answer and arrival, and all spent seconds between start and arrival.

    `ahead`: a bucketed allreduce may compute before this shard made the weights.
    """
    pushes = shard.pushes[rows]
    behind = schema.backward_s(pushes)
    computed = pushes["compute_s"] - behind + pushes["delay_s"] + (pushes[_NEIGHBOURS] if _NEIGHBOURS in _spent(pushes) else 0.0)
    since_answer = pushes["arrival_s"][1:] - pushes["answer_s"][:-1]
    for at in np.flatnonzero((computed[1:] > _most(since_answer)) & (not ahead))[:1] + 1:
        why = f"{computed[at]} s of computing and delay, but the push came {since_answer[at - 1]} s after the weights were given"
        _refuse(shard, int(rows[at]), why)
    spent = np.cumsum(sum(pushes[name] for name in _spent(pushes))) - behind
    spent -= spent[0] if ahead else pushes["wait_s"][0] + pushes["pull_s"][0]
    elapsed = pushes["arrival_s"] - shard.start.since_s
    for at in np.flatnonzero(~(spent <= _most(elapsed)))[:1]:
        _refuse(shard, int(rows[at]), f"the learner has spent {spent[at]} s, but the push arrived {elapsed[at]} s after the start")


def _check_delays(record: Record, shard: ShardRecord, learner_id: int, rows: LogRows) -> None:
    """Check delays by (seed, learner_id, computation number); a slow learner's also by compute seconds."""
    config = record.config
    pushes = shard.pushes[rows]
    if not config.straggler.active or config.in_teams:
        for at in np.flatnonzero(pushes["delay_s"] != 0)[:1]:
            whose = "the ranks of a team take theirs" if config.in_teams else "none was put in"
            _refuse(shard, int(rows[at]), f"delay_s {pushes['delay_s'][at]}: {whose}")
    if not config.straggler.active:
        return
    all_delays = [Delays(config.straggler, config.seed, rank) for rank in record.members[learner_id]]
    numbers = _computations(record, shard, learner_id, pushes["seq"])
    for at, (number, compute_s, delay_s) in enumerate(zip(numbers, *(pushes[name].tolist() for name in _SPENT[:2]), strict=True)):
        if config.in_teams:
            least_s = max(each.of(number, 0.0) for each in all_delays)
            if least_s > compute_s + _SLACK_S + _DRIFT * compute_s:
                _refuse(shard, int(rows[at]), f"compute_s {compute_s}, but the delay of a rank is {least_s} s")
            continue
        (delays,) = all_delays
        exact = not config.per_layer or delays.of(number, 0.0) == delays.of(number, 1.0)
        put_in_s = int(delays.of(number, compute_s if exact else 0.0) * 1e9) * 1e-9
        if delay_s != put_in_s and (exact or delay_s < put_in_s):
            _refuse(shard, int(rows[at]), f"delay_s {delay_s}: {'' if exact else 'at least '}{put_in_s} s were put in")


def _computations(record: Record, shard: ShardRecord, learner_id: int, seq: np.ndarray) -> list[int]:
    """Return the number of each push's computation; mini-batches given up, or rejected, count again."""
    config = record.config
    if config.per_layer or config.in_teams or config.protocol.collective:
        numbers: list[int] = seq.tolist()
        return numbers
    gave_up = shard.events_of[learner_id]
    gave_up = gave_up[gave_up["kind"] == Event.GAVE_UP]
    before = np.searchsorted(np.sort(gave_up["value"]), seq, side="right")
    first = record.next_seq[learner_id]
    return [first + at + int(given_up) for at, given_up in enumerate(before)]


def _refuse(shard: ShardRecord, row: int, why: str) -> None:
    its = shard.row(row)
    refuse(why, shard.shard, "pushes", row=row, clock=its.clock, learner_id=its.learner_id, seq=its.seq)


def seconds_of(ns_s: float) -> float:
    """Return seconds after travel as nanoseconds."""
    return int(ns_s * 1e9) * 1e-9 if math.isfinite(ns_s) else ns_s
