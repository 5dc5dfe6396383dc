"""Checks of a shard's seconds: not computable again, but consecutive, with delays drawn by name.

A learner does a single thing at a time: its seconds fit between the shards' news of it. The first pull is left out: clocks wait for
each other there. Hosts' clocks may drift apart by `_DRIFT`.
"""

from __future__ import annotations

import math

import numpy as np

from mpisgd.gradient.straggler import Delays
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record, ShardRecord

_DRIFT = 1e-3
_SLACK_S = 1e-6
_SPENT = ("compute_s", "delay_s", "push_s", "wait_s", "pull_s")
_NEIGHBOURS = "neighbour_s"


def check_seconds(record: Record, shard: ShardRecord) -> None:
    """Raise Untrue at the first impossible seconds."""
    _check_updates(shard)
    _check_floats(record, shard)
    for learner_id, numbers in enumerate(shard.rows_of):
        rows = numbers[~np.isin(numbers, list(shard.inserted))] if shard.inserted else numbers
        if len(rows):
            _check_spent(shard, rows, ahead=record.config.in_buckets and learner_id != shard.shard)
            _check_delays(record, shard, learner_id, rows)


def _check_updates(shard: ShardRecord) -> None:
    spent = shard.updates["update_s"]
    between = np.diff(shard.updates["time_s"], prepend=shard.start.since_s)
    wrong = np.flatnonzero(~((spent >= 0) & (spent <= _most(between))))
    if len(wrong):
        row = int(wrong[0])
        why = f"the update took {spent[row]} s, but was done {between[row]} s after the update before, or the start"
        refuse(why, shard.shard, "updates", row=row, clock=shard.start.clock + row + 1)


def _most(elapsed: np.ndarray) -> np.ndarray:
    """Return the most seconds spent during `elapsed` elsewhere."""
    most: np.ndarray = elapsed * (1 + _DRIFT) + _SLACK_S
    return most


def _check_floats(record: Record, shard: ShardRecord) -> None:
    if record.config.push_format == "float32" and (wrong := np.flatnonzero(shard.pushes["rounded"] != 0)).size:
        _refuse(shard, int(wrong[0]), f"rounded {shard.pushes['rounded'][wrong[0]]}: gradients were pushed as float32")
    for name in _spent(shard.pushes):
        if (wrong := np.flatnonzero(~(shard.pushes[name] >= 0))).size:
            _refuse(shard, int(wrong[0]), f"{name} {shard.pushes[name][wrong[0]]}")


def _spent(pushes: LogRows) -> tuple[str, ...]:
    return (*_SPENT, _NEIGHBOURS) if _NEIGHBOURS in (pushes.dtype.names or ()) else _SPENT


def _check_spent(shard: ShardRecord, rows: LogRows, *, ahead: bool) -> None:
    """Check that computing fits between answer and arrival, and all spent seconds between start and arrival.

    `ahead`: a bucketed allreduce may compute before this shard made the weights.
    """
    pushes = shard.pushes[rows]
    computed = pushes["compute_s"] + pushes["delay_s"] + (pushes[_NEIGHBOURS] if _NEIGHBOURS in _spent(pushes) else 0.0)
    since_answer = pushes["arrival_s"][1:] - pushes["answer_s"][:-1]
    for at in np.flatnonzero((computed[1:] > _most(since_answer)) & (not ahead))[:1] + 1:
        why = f"{computed[at]} s of computing and delay, but the push came {since_answer[at - 1]} s after the weights were given"
        _refuse(shard, int(rows[at]), why)
    spent = np.cumsum(sum(pushes[name] for name in _spent(pushes)))
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
        exact = not config.by_layers or delays.of(number, 0.0) == delays.of(number, 1.0)
        put_in_s = int(delays.of(number, compute_s if exact else 0.0) * 1e9) * 1e-9
        if delay_s != put_in_s and (exact or delay_s < put_in_s):
            _refuse(shard, int(rows[at]), f"delay_s {delay_s}: {'' if exact else 'at least '}{put_in_s} s were put in")


def _computations(record: Record, shard: ShardRecord, learner_id: int, seq: np.ndarray) -> list[int]:
    """Return the number of each push's computation; mini-batches given up, or rejected, count again."""
    config = record.config
    if config.by_layers or config.in_teams or config.protocol.collective:
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
