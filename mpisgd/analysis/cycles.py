"""Activities of learners, mini-batch by mini-batch, on the common clock of `timeline`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.schema import LogRows

#: Activities of a learner for a mini-batch, in order.
ACTIVITIES = ("wait", "pull", "compute", "neighbour", "delay", "push")

WAIT, PULL, COMPUTE, NEIGHBOUR, DELAY, PUSH = range(6)

NEVER = 1 << 62

NO_ANSWER = -NEVER

APART_NS = 10**7  # headers sent at once arrive closer


@dataclass(frozen=True)
class Cycles:
    """Activities of learners for each push, learner by learner, in order.

    edges: (cycles, 7) int64; activity a of cycle i lasts from edges[i, a] to edges[i, a + 1].
    slack: (cycles,) int64; how much later the whole cycle may have been.
    known: (cycles,) bool; whether the push's length is known.
    row: (cycles,) int64; row of the lowest shard in `Timeline.pushes`.
    """

    learner_id: np.ndarray
    edges: np.ndarray
    slack: np.ndarray
    known: np.ndarray
    row: LogRows


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Return int64 nanoseconds, as measured; NaN becomes 0."""
    return np.asarray(np.rint(1e9 * np.nan_to_num(seconds)), np.int64)


@dataclass(frozen=True)
class _Chains:
    """Cycles as in rows of `pushes`, learner by learner; nanoseconds.

    first: each learner's first cycle. durations: (cycles, 6) by ACTIVITIES, with the push of the cycle before, and computing during
    that push. push: of this cycle, 0 = unknown.
    """

    row: LogRows
    first: np.ndarray
    durations: np.ndarray
    push: LogRows
    known: np.ndarray


def chains_of(pushes: LogRows, cycle: np.ndarray) -> _Chains:
    row = np.empty(int(cycle.max()) + 1, np.int64)
    row[cycle[::-1]] = np.arange(len(pushes))[::-1]
    first = np.flatnonzero(np.diff(pushes["learner_id"][row], prepend=-1))
    there = pushes.dtype.names or ()
    spent = [pushes[f"{name}_s"][row] if f"{name}_s" in there else np.zeros(len(row)) for name in ACTIVITIES]
    durations = np.stack([nanoseconds(seconds) for seconds in spent], axis=1)
    behind = nanoseconds(schema.backward_s(pushes[row]))
    durations[:, COMPUTE] -= behind
    known = np.ones(len(row), bool)
    known[np.append(first[1:], len(row)) - 1] = False
    push = np.where(known, np.roll(durations[:, PUSH], -1) + behind, 0)
    durations[1:, PUSH] += np.where(known, behind, 0)[:-1]
    return _Chains(row, first, durations, push, known)


def offsets_of(pushes: LogRows, cycle: np.ndarray, chains: _Chains, shards: int, *, together: bool) -> np.ndarray:
    """Return nanoseconds to add to each shard's times, int64 (shards,): the least that makes the log possible.

    A push arrives on all shards between its begin and its end; `together`: mostly at once.
    """
    arrival, shard = nanoseconds(pushes["arrival_s"]), pushes["shard"]
    on_0 = np.full(len(chains.row), NEVER)
    on_0[cycle[shard == 0]] = arrival[shard == 0]
    usable = chains.known[cycle] & (on_0[cycle] < NEVER)
    behind, push = (on_0[cycle] - arrival)[usable], chains.push[cycle][usable]
    least, most, likely = np.full(shards, -NEVER), np.full(shards, NEVER), np.zeros(shards, np.int64)
    np.maximum.at(least, shard[usable], behind - push)
    np.minimum.at(most, shard[usable], behind + push)
    for number in np.unique(shard[usable]) if together else ():
        middle = int(np.median(behind[shard[usable] == number]))
        likely[number] = middle if abs(middle) > APART_NS else 0
    return np.asarray(np.where(least > most, (least + most) // 2, np.clip(likely, least, most)))


def cycles_of(pushes: LogRows, cycle: np.ndarray, chains: _Chains, arrival: np.ndarray, answer: np.ndarray) -> Cycles:
    durations, push = chains.durations, chains.push
    before = durations.sum(axis=1)
    last_arrival = _largest(arrival, cycle)
    low, high = _bounds(pushes, cycle, chains, arrival, answer)
    begin, slack = np.empty_like(push), np.empty_like(push)
    for own in (slice(*ends) for ends in itertools.pairwise([*chains.first.tolist(), len(push)])):
        accounted = np.cumsum(before[own])
        least = np.maximum.accumulate(np.maximum(low[own] - accounted, 0))
        most = np.minimum.accumulate((high[own] - accounted)[::-1])[::-1]
        unaccounted = np.minimum(least, most)  # time in no row before each push: grows, as both bounds do
        begin[own], slack[own] = accounted + unaccounted, most - unaccounted

    edges = np.empty((len(push), len(ACTIVITIES) + 1), np.int64)
    edges[:, PUSH] = begin
    for activity in (DELAY, NEIGHBOUR, COMPUTE, PULL, WAIT):
        edges[:, activity] = edges[:, activity + 1] - durations[:, activity]
    edges[:, -1] = np.where(chains.known, begin + push, np.maximum(begin, last_arrival))
    return Cycles(pushes["learner_id"][chains.row], np.maximum(edges, 0), slack, chains.known, chains.row)


def _bounds(
    pushes: LogRows, cycle: np.ndarray, chains: _Chains, arrival: np.ndarray, answer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the earliest and latest begin of each push: int64 (cycles,) each.

    Earliest: max(answer_0 + pull, last answer) + compute + delay, and the last arrival minus the length. Latest: the first arrival,
    and the next pull's first answer minus the length.
    """
    durations, push, known = chains.durations, chains.push, chains.known
    answer_0, on_0 = np.full(len(push), NO_ANSWER), pushes["shard"] == 0
    answer_0[cycle[on_0]] = answer[on_0]
    pull_ended = np.maximum(np.roll(answer_0, 1) + durations[:, PULL], np.roll(_largest(answer, cycle), 1))
    pull_ended[chains.first] = -NEVER  # the first pull is in no row
    taken = np.where(known, _largest(arrival, cycle) - push, -NEVER)
    low = np.maximum(pull_ended + durations[:, COMPUTE:PUSH].sum(axis=1), taken)
    first_answer = -_largest(-np.where(answer == NO_ANSWER, NEVER, answer), cycle)
    return low, np.minimum(-_largest(-arrival, cycle), first_answer - push)


def number_cycles(pushes: LogRows, path: Path) -> np.ndarray:
    """Return each push's cycle, running on from learner to learner: int64 (pushes,).

    No push overtakes another: a learner's k-th on a shard is its k-th on every shard.
    """
    learner, shard, arrival_s = pushes["learner_id"].astype(np.int64), pushes["shard"], pushes["arrival_s"]
    follows = np.zeros(len(pushes), bool)
    follows[1:] = (learner[1:] == learner[:-1]) & (shard[1:] == shard[:-1])
    backwards = np.flatnonzero(follows[1:] & (arrival_s[1:] < arrival_s[:-1])) + 1
    if len(backwards):
        at = pushes[backwards[0]]
        raise DataError(
            f"{path}: mini-batch {at['seq']} of learner {at['learner_id']} arrived on shard {at['shard']} before the preceding"
            " mini-batch; does the log hold several attempts, with seconds from different starts?"
        )
    here = np.arange(len(pushes))
    number = here - np.maximum.accumulate(np.where(follows, 0, here))
    counts = np.zeros(int(learner.max()) + 1, np.int64)
    np.maximum.at(counts, learner, number + 1)
    return np.asarray((np.cumsum(counts) - counts)[learner] + number)


def _largest(values: np.ndarray, cycle: np.ndarray) -> np.ndarray:
    largest = np.full(int(cycle.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(largest, cycle, values)
    return largest
