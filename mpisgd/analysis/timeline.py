"""Spans of computing, waiting, sending and receiving, rank by rank on one clock, from a run's log alone.

Learners log durations, shards log moments; both count from the common start barrier. All times here are int64 nanoseconds.

Exact, on the learner's own clock: how long each wait, pull, compute, delay and push took, and their order; but of a learner's
last push the length is in no row, and it is drawn up to its last arrival, its least length.
Exact, on the shard's own clock: when a push arrived (its header was taken out of the queue), when the pull after it was
answered, each update from begin to end, events. When a shard had received a slice, and when an answer had left, is not logged.

Reconstructed: where on the common clock a learner's spans lie. Between its pushes i - 1 and i there is the time that rows
account for (push, wait, pull, compute, delay) and time in no row, such as preparing a mini-batch, which lies between push and
wait. Of the moment at which push i began one knows that

- it was not before weights were there, computed with and delayed: the pull before it began to end when shard 0 answered, and
  ended after the last shard had answered, so it was not before max(answer_0 + pull, last answer) + compute + delay;
- it was not before its last arrival less its length, for a push ends after all shards have taken it;
- it was not after its first arrival, nor after the first answer to the pull that followed it, less its length;
- time in no row is never negative: pushes are at least the accounted time apart, and the first counts from the barrier.

Every push is placed at the earliest moment that fits all of this, also what is known of pushes before and after it. So spans of
one rank never overlap, and no push begins after its arrival; `Cycles.slack` says how much later it may have begun. Where clocks
disagree, so that nothing fits all, arrivals are believed.

Ranks leave the start barrier some microseconds, on a crowded node milliseconds, apart. What is drawn is the clock of shard 0. A
push arrives on all shards between its begin and its end: where a shard's log contradicts that, all its moments are moved by the
least that mends it. What a learner did before shard 0's clock began is cut off.

Evaluations: their length is exact, their begin is the earliest possible: after the snapshot was taken and the last evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpisgd.analysis import about, books
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

#: What a learner does for one mini-batch, in this order.
ACTIVITIES = ("wait", "pull", "compute", "delay", "push")
WAIT, PULL, COMPUTE, DELAY, PUSH = range(5)

#: Unless asked for more, so many learners and pushes are shown: viewers of traces grow slow.
MOST_LEARNERS = 256
MOST_PUSHES = 50_000

_NEVER = 1 << 62
NO_ANSWER = -_NEVER


@dataclass(frozen=True)
class Ranks:
    """Rank and host of each role. Without a rank of its own, the evaluator has learner 0's."""

    shards: Sequence[int]
    learners: Sequence[int]
    evaluator: int
    hosts: Sequence[str]

    @property
    def dedicated_evaluator(self) -> bool:
        return self.evaluator != self.learners[0]

    def host(self, rank: int) -> str:
        return str(self.hosts[rank]) if rank < len(self.hosts) else "unknown host"


@dataclass(frozen=True)
class Window:
    """The nanoseconds to show."""

    start: int
    end: int

    def of(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Indices of the spans, or moments, that the window touches."""
        return np.flatnonzero((end >= self.start) & (start <= self.end))


@dataclass(frozen=True)
class Cycles:
    """Activities of learners for each push, learner by learner, in order.

    edges: (cycles, 6) int64; activity a of cycle i lasts from edges[i, a] to edges[i, a + 1].
    slack: (cycles,) int64; all of the cycle may have been so much later.
    known: (cycles,) bool; the length of the push is known.
    row: (cycles,) int64; the row in `Timeline.pushes` of the lowest shard that logged it.
    """

    learner_id: np.ndarray
    edges: np.ndarray
    slack: np.ndarray
    known: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class Updates:
    """Spans of the rows of `updates`, with the mean staleness of their gradients (NaN where they have none)."""

    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray
    staleness: np.ndarray


@dataclass(frozen=True)
class Evaluations:
    """Spans of the rows of `evaluations`."""

    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Timeline:
    """A run, or its first learners, and the window of it that is to be shown.

    pushes: rows of the learners shown, learner by learner, shard by shard, in order.
    arrival, answer: (pushes,) int64; answer may be NO_ANSWER.
    cycle: (pushes,) int64; which of `cycles` each is part of.
    update: (pushes,) int64; which of `updates` each went into, -1 = none.
    events, moment: rows of `events`, and their nanoseconds.
    notes: how it was cut, one line each.
    """

    ranks: Ranks
    window: Window
    learners: int
    pushes: np.ndarray
    arrival: np.ndarray
    answer: np.ndarray
    cycle: np.ndarray
    update: np.ndarray
    cycles: Cycles
    updates: Updates
    evaluations: Evaluations
    events: np.ndarray
    moment: np.ndarray
    notes: tuple[str, ...]

    def slack(self) -> str:
        """Say in a line how well learners' spans are placed."""
        shown = self.window.of(self.cycles.edges[:, 0], self.cycles.edges[:, -1])
        if len(shown) == 0:
            return "no learner's span lies in this window"
        median, most = np.percentile(self.cycles.slack[shown], (50, 99)) / 1e6
        late = f"up to {median:.3g} ms later (median; 99th percentile: {most:.3g} ms)"
        return f"learners' spans are drawn as early as the log allows; they may have been {late}"


def ranks_of(run: Run) -> Ranks:
    """Read the ranks from [environment]; what it does not tell is as `roles.assign` packs ranks.

    Of a team, the leader's rank stands for the learner. Where learners double as shards, a shard has a row of its own, for both do
    things at once: it is numbered after all ranks.
    """
    environment = run.environment
    shards = [int(rank) for rank in environment.get("shard_ranks", range(run.shards))]
    evaluator, hosts = int(environment.get("evaluator_rank", -1)), list(environment.get("hosts", []))
    if about.doubled(run):
        learners, size = shards, len(hosts)
        shards = [size + rank for rank in learners]
        return Ranks(shards, learners, evaluator if evaluator >= 0 else learners[0], [*hosts, *(hosts[rank] for rank in learners)])
    if run.teams:
        leaders = [team[0] for team in run.teams]
        return Ranks(shards, leaders, evaluator if evaluator >= 0 else leaders[0], hosts)
    taken = {*shards, evaluator}
    others = (rank for rank in itertools.count() if rank not in taken)
    learners = list(itertools.islice(others, books.learners_of(run)))
    return Ranks(shards, learners, evaluator if evaluator >= 0 else learners[0], hosts)


def look(run: Run, *, from_s: float | None = None, to_s: float | None = None, learners: int | None = None) -> Timeline:
    """The timeline of a run: of its first `learners` learners, from `from_s` to `to_s`.

    By default of all, but of at most MOST_LEARNERS, and up to the end, but for at most MOST_PUSHES pushes; `notes` say so.

    Raises DataError (no push was logged, the log holds several attempts, or layers were exchanged one by one), ConfigError (there
    can be no such window).
    """
    if about.layerwise(run):
        raise DataError(f"{run.path}: there is no timeline, its layers were pulled and pushed in the middle of computing")
    if to_s is not None and not (from_s or 0.0) <= to_s:
        raise ConfigError(f"--from-s {from_s or 0.0:g} --to-s {to_s:g}: expected a window that does not end before it begins")
    if learners is not None and learners < 1:
        raise ConfigError(f"--learners {learners}: expected at least 1")
    all_learners = books.learners_of(run)
    shown = min(all_learners, learners or MOST_LEARNERS)
    notes: list[str] = []
    if shown < all_learners:
        notes.append(f"learners 0 to {shown - 1:,} of {all_learners:,}; choose their number by --learners")
    pushes = run.pushes[run.pushes["learner_id"] < shown]
    if len(pushes) == 0:
        raise DataError(f"{run.path}: there is no timeline, no gradient was pushed by learners 0 to {shown - 1:,}")
    pushes = pushes[np.lexsort((pushes["shard"], pushes["learner_id"]))]  # stable: the order in time stays within each
    cycle = _number(pushes, run.path)
    chains = _chains(pushes, cycle)
    offset = _offsets(pushes, cycle, chains, run.shards)
    arrival = nanoseconds(pushes["arrival_s"]) + offset[pushes["shard"]]
    answer = np.where(np.isnan(pushes["answer_s"]), NO_ANSWER, nanoseconds(pushes["answer_s"]) + offset[pushes["shard"]])
    cycles = _cycles(pushes, cycle, chains, arrival, answer)
    updates, update = _updates(run, pushes, offset)
    ranks = ranks_of(run)
    after = 0 if ranks.dedicated_evaluator else int(cycles.edges[cycles.learner_id == 0, -1].max(initial=0))
    evaluations = _evaluations(run, after)
    moment = nanoseconds(run.events["time_s"]) + np.where(run.events["shard"] >= 0, offset[run.events["shard"]], 0)
    end = max(int(ends.max(initial=0)) for ends in (cycles.edges[:, -1], updates.end, evaluations.end, moment))
    window, note = _window(arrival, end, from_s, to_s)
    return Timeline(
        ranks=ranks,
        window=window,
        learners=shown,
        pushes=pushes,
        arrival=arrival,
        answer=answer,
        cycle=cycle,
        update=update,
        cycles=cycles,
        updates=updates,
        evaluations=evaluations,
        events=run.events,
        moment=moment,
        notes=(*notes, *note, *_apart(offset)),
    )


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Seconds as int64 nanoseconds, which is what they were when they were measured; NaN becomes 0."""
    return np.asarray(np.rint(1e9 * np.nan_to_num(seconds)), np.int64)


def _window(arrival: np.ndarray, end: int, from_s: float | None, to_s: float | None) -> tuple[Window, list[str]]:
    """The window, and a line where it was cut; `end` is that of the log."""
    if from_s is not None and not 1e9 * from_s <= end:
        raise ConfigError(f"--from-s {from_s:g}: expected a number below {end / 1e9:g}, at which the log ends")
    start = 0 if from_s is None else round(1e9 * max(from_s, 0.0))
    if to_s is not None:
        return Window(start, end if 1e9 * to_s >= end else round(1e9 * to_s)), []
    following = arrival[arrival >= start]
    if len(following) <= MOST_PUSHES:
        return Window(start, end), []
    cut = int(np.partition(following, MOST_PUSHES - 1)[MOST_PUSHES - 1])
    note = f"{start / 1e9:g} s to {cut / 1e9:g} s of {end / 1e9:g} s, {MOST_PUSHES:,} pushes; choose by --from-s, --to-s"
    return Window(start, cut), [note]


def _apart(offset: np.ndarray) -> list[str]:
    """Say in a line which shards' seconds were moved."""
    moved = [f"shard {shard} by {offset[shard] / 1e6:+.3g} ms" for shard in np.flatnonzero(offset).tolist()]
    return [f"moved, as these shards left the start barrier before or after shard 0: {', '.join(moved)}"] if moved else []


# ------------------------------------------------------------------------------------------------------------ learners


@dataclass(frozen=True)
class _Chains:
    """Cycles as rows of `pushes` tell them, learner by learner; nanoseconds.

    first: index of each learner's first cycle. durations: (cycles, 5), of ACTIVITIES, but for the push, which is that of the
    cycle before. push: of this cycle, 0 where it is not known.
    """

    row: np.ndarray
    first: np.ndarray
    durations: np.ndarray
    push: np.ndarray
    known: np.ndarray


def _chains(pushes: np.ndarray, cycle: np.ndarray) -> _Chains:
    row = np.empty(int(cycle.max()) + 1, np.int64)
    row[cycle[::-1]] = np.arange(len(pushes))[::-1]
    first = np.flatnonzero(np.diff(pushes["learner_id"][row], prepend=-1))
    durations = np.stack([nanoseconds(pushes[f"{name}_s"][row]) for name in ACTIVITIES], axis=1)
    known = np.ones(len(row), bool)
    known[np.append(first[1:], len(row)) - 1] = False
    return _Chains(row, first, durations, np.where(known, np.roll(durations[:, PUSH], -1), 0), known)


def _offsets(pushes: np.ndarray, cycle: np.ndarray, chains: _Chains, shards: int) -> np.ndarray:
    """Nanoseconds to add to the seconds of each shard, int64 (shards,): none to shard 0's; the least that makes a log possible.

    A push arrives on all shards between its begin and its end.
    """
    arrival, shard = nanoseconds(pushes["arrival_s"]), pushes["shard"]
    on_0 = np.full(len(chains.row), _NEVER)
    on_0[cycle[shard == 0]] = arrival[shard == 0]
    usable = chains.known[cycle] & (on_0[cycle] < _NEVER)
    behind, push = (on_0[cycle] - arrival)[usable], chains.push[cycle][usable]
    least, most = np.full(shards, -_NEVER), np.full(shards, _NEVER)
    np.maximum.at(least, shard[usable], behind - push)
    np.minimum.at(most, shard[usable], behind + push)
    return np.asarray(np.where(least > most, (least + most) // 2, np.clip(0, least, most)))


def _cycles(pushes: np.ndarray, cycle: np.ndarray, chains: _Chains, arrival: np.ndarray, answer: np.ndarray) -> Cycles:
    """Place what learners did on the common clock."""
    durations, push = chains.durations, chains.push
    before = durations.sum(axis=1)
    last_arrival = _largest(arrival, cycle)
    low, high = _bounds(pushes, cycle, chains, arrival, answer)
    begin, slack = np.empty_like(push), np.empty_like(push)
    for own in (slice(*ends) for ends in itertools.pairwise([*chains.first.tolist(), len(push)])):
        accounted = np.cumsum(before[own])
        least = np.maximum.accumulate(np.maximum(low[own] - accounted, 0))
        most = np.minimum.accumulate((high[own] - accounted)[::-1])[::-1]
        unaccounted = np.minimum(least, most)  # in no row, up to each push: grows, as both of them do
        begin[own], slack[own] = accounted + unaccounted, most - unaccounted

    edges = np.empty((len(push), len(ACTIVITIES) + 1), np.int64)
    edges[:, PUSH] = begin
    for activity in (DELAY, COMPUTE, PULL, WAIT):
        edges[:, activity] = edges[:, activity + 1] - durations[:, activity]
    edges[:, -1] = np.where(chains.known, begin + push, np.maximum(begin, last_arrival))
    return Cycles(pushes["learner_id"][chains.row], np.maximum(edges, 0), slack, chains.known, chains.row)


def _bounds(
    pushes: np.ndarray, cycle: np.ndarray, chains: _Chains, arrival: np.ndarray, answer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Between which moments each push began, by the module's text, but for what other pushes tell: int64 (cycles,) each."""
    durations, push, known = chains.durations, chains.push, chains.known
    answer_0, on_0 = np.full(len(push), NO_ANSWER), pushes["shard"] == 0
    answer_0[cycle[on_0]] = answer[on_0]
    pull_ended = np.maximum(np.roll(answer_0, 1) + durations[:, PULL], np.roll(_largest(answer, cycle), 1))
    pull_ended[chains.first] = -_NEVER  # the first pull is in no row
    taken = np.where(known, _largest(arrival, cycle) - push, -_NEVER)
    low = np.maximum(pull_ended + durations[:, COMPUTE] + durations[:, DELAY], taken)
    first_answer = -_largest(-np.where(answer == NO_ANSWER, _NEVER, answer), cycle)
    return low, np.minimum(-_largest(-arrival, cycle), first_answer - push)


def _number(pushes: np.ndarray, path: Path) -> np.ndarray:
    """Number the cycle that each push is part of: int64 (pushes,), running on from learner to learner.

    Every push goes to all shards, and overtakes none: a learner's k-th on one shard is its k-th on every other.
    """
    learner, shard, arrival_s = pushes["learner_id"].astype(np.int64), pushes["shard"], pushes["arrival_s"]
    follows = np.zeros(len(pushes), bool)
    follows[1:] = (learner[1:] == learner[:-1]) & (shard[1:] == shard[:-1])
    backwards = np.flatnonzero(follows[1:] & (arrival_s[1:] < arrival_s[:-1])) + 1
    if len(backwards):
        at = pushes[backwards[0]]
        raise DataError(
            f"{path}: mini-batch {at['seq']} of learner {at['learner_id']} arrived on shard {at['shard']} before the one before"
            " it; does the log hold several attempts, whose seconds count from different starts?"
        )
    here = np.arange(len(pushes))
    number = here - np.maximum.accumulate(np.where(follows, 0, here))
    counts = np.zeros(int(learner.max()) + 1, np.int64)
    np.maximum.at(counts, learner, number + 1)
    return np.asarray((np.cumsum(counts) - counts)[learner] + number)


def _largest(values: np.ndarray, cycle: np.ndarray) -> np.ndarray:
    """The largest over the shards, for each cycle."""
    largest = np.full(int(cycle.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(largest, cycle, values)
    return largest


# -------------------------------------------------------------------------------------------------- shards and evaluator


def _updates(run: Run, pushes: np.ndarray, offset: np.ndarray) -> tuple[Updates, np.ndarray]:
    """Spans of all updates, and which of them each of `pushes` went into."""
    rows, all_pushes = run.updates, run.pushes
    end = nanoseconds(rows["time_s"]) + offset[rows["shard"]]
    start = end - nanoseconds(rows["update_s"])
    follows = np.flatnonzero(rows["shard"][1:] == rows["shard"][:-1]) + 1
    start[follows] = np.maximum(start[follows], end[follows - 1])  # two roundings may be a nanosecond apart

    clocks = int(max(rows["clock"].max(initial=0), all_pushes["clock"].max(initial=0) + 1)) + 1
    applied = books.applied_rows(run)
    cell = all_pushes["shard"][applied] * np.int64(clocks) + all_pushes["clock"][applied] + 1
    count = np.bincount(cell, minlength=run.shards * clocks)
    total = np.bincount(cell, weights=all_pushes["staleness"][applied], minlength=run.shards * clocks)
    own = rows["shard"] * np.int64(clocks) + rows["clock"]
    with np.errstate(invalid="ignore"):
        staleness = total[own] / count[own]

    which = np.full(run.shards * clocks, -1)
    which[own] = np.arange(len(rows))
    update = which[pushes["shard"] * np.int64(clocks) + pushes["clock"] + 1]
    update[pushes["verdict"] != Verdict.APPLY] = -1
    return Updates(rows, start, end, staleness), update


def _evaluations(run: Run, after: int) -> Evaluations:
    """Place evaluations one after the other, none before its snapshot was taken, nor before nanosecond `after`."""
    rows = run.evaluations
    lengths = nanoseconds(rows["evaluate_s"])
    before = np.cumsum(lengths) - lengths
    start = before + np.maximum.accumulate(np.maximum(nanoseconds(rows["taken_s"]), after) - before)
    return Evaluations(rows, start, start + lengths)
