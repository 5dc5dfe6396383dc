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

A learner that is a group of ranks has a row for each of these, one stage of the model. Its pushes are those to the shards of that
stage. What it waited for its neighbours lies between pieces of computing; it is drawn behind all of them, at its length.

Ranks leave the start barrier some microseconds, on a crowded node milliseconds, apart. What is drawn is the clock of shard 0. A
push arrives on all shards between its begin and its end: where a shard's log contradicts that, all its moments are moved by the
least that mends it. What a learner did before shard 0's clock began is cut off.

Evaluations: their length is exact, their begin is the earliest possible: after the snapshot was taken and the last evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, books
from mpisgd.analysis.cycles import (
    NO_ANSWER,
    Cycles,
    chains_of,
    cycles_of,
    nanoseconds,
    number_cycles,
    offsets_of,
)
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import PUSHES_OF_GROUPS, LogRows, Verdict

#: Unless asked for more, so many learners and pushes are shown: viewers of traces grow slow.
MOST_LEARNERS = 256
MOST_PUSHES = 50_000


@dataclass(frozen=True)
class Ranks:
    """Rank and host of each role. Without a rank of its own, the evaluator has learner 0's.

    `group`: how many ranks a learner is; `learners` then has all of them, learner by learner.
    """

    shards: Sequence[int]
    learners: Sequence[int]
    evaluator: int
    hosts: Sequence[str]
    group: int = 1

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
class Spans:
    """Spans of the rows of a table."""

    rows: LogRows
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Updates(Spans):
    """Those of `updates`, with the mean staleness of their gradients (NaN where they have none)."""

    staleness: np.ndarray


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
    pushes: LogRows
    arrival: np.ndarray
    answer: np.ndarray
    cycle: np.ndarray
    update: LogRows
    cycles: Cycles
    updates: Updates
    evaluations: Spans
    events: LogRows
    moment: np.ndarray
    notes: tuple[str, ...]

    @property
    def names(self) -> dict[int, str]:
        """What each rank shown is called: shards first."""
        evaluator = {self.ranks.evaluator: "evaluator"} if self.ranks.dedicated_evaluator else {}
        shown, group = self.ranks.learners[: self.learners], self.ranks.group
        learners = {rank: f"learner {at // group}{f', stage {at % group}' if group > 1 else ''}" for at, rank in enumerate(shown)}
        shards = {rank: f"shard {shard}" for shard, rank in enumerate(self.ranks.shards)}
        return shards | evaluator | learners

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
    if groups := about.groups_of(run):
        computing = [rank for group in groups for rank in group]
        return Ranks(shards, computing, evaluator if evaluator >= 0 else computing[0], hosts, len(groups[0]))
    taken = {*shards, evaluator}
    others = (rank for rank in itertools.count() if rank not in taken)
    learners = list(itertools.islice(others, books.learners_of(run)))
    return Ranks(shards, learners, evaluator if evaluator >= 0 else learners[0], hosts)


def look(run: Run, *, from_s: float | None = None, to_s: float | None = None, learners: int | None = None) -> Timeline:
    """The timeline of a run: of its first `learners` learners, from `from_s` to `to_s`.

    By default of all, but of at most MOST_LEARNERS, and up to the end, but for at most MOST_PUSHES pushes; `notes` say so.

    Raises DataError (no push was logged, the log holds several attempts, layers were exchanged one by one, an earlier mpisgd
    logged a run of groups),
    ConfigError (there can be no such window).
    """
    if about.layerwise(run):
        raise DataError(f"{run.path}: there is no timeline, its layers were pulled and pushed in the middle of computing")
    groups = len(about.groups_of(run)) > 0
    if groups and run.pushes.dtype != PUSHES_OF_GROUPS:
        raise DataError(f"{run.path}: there is no timeline, its log does not tell of groups what they waited for neighbours")
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
    events = run.events
    if groups:  # each rank is drawn as a learner is
        stage, group = _stages(run), len(about.groups_of(run)[0])
        pushes["learner_id"] = pushes["learner_id"] * group + stage[pushes["shard"]]
        events = events.copy()
        own = (events["learner_id"] >= 0) & (events["shard"] >= 0)
        events["learner_id"][own] = events["learner_id"][own] * group + stage[events["shard"][own]]
        shown *= group
    if len(pushes) == 0:
        raise DataError(f"{run.path}: there is no timeline, no gradient was pushed by learners 0 to {shown - 1:,}")
    pushes = pushes[np.lexsort((pushes["shard"], pushes["learner_id"]))]  # stable: the order in time stays within each
    cycle = number_cycles(pushes, run.path)
    chains = chains_of(pushes, cycle)
    offset = offsets_of(pushes, cycle, chains, run.shards)
    arrival = nanoseconds(pushes["arrival_s"]) + offset[pushes["shard"]]
    answer = np.where(np.isnan(pushes["answer_s"]), NO_ANSWER, nanoseconds(pushes["answer_s"]) + offset[pushes["shard"]])
    cycles = cycles_of(pushes, cycle, chains, arrival, answer)
    updates, update = _updates(run, pushes, offset)
    ranks = ranks_of(run)
    after = 0 if ranks.dedicated_evaluator else int(cycles.edges[cycles.learner_id == 0, -1].max(initial=0))
    evaluations = _evaluations(run, after)
    moment = nanoseconds(events["time_s"]) + np.where(events["shard"] >= 0, offset[events["shard"]], 0)
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
        events=events,
        moment=moment,
        notes=(*notes, *note, *_apart(offset)),
    )


def _stages(run: Run) -> np.ndarray:
    """Of each shard, the stage of the model that it has parameters of; int64 (shards,)."""
    stages = run.environment["stages"]
    return np.repeat(np.arange(len(stages)), [len(shards) for shards in stages])


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
    moved = [f"shard {shard} by {offset[shard] / 1e6:+.3g} ms" for shard in np.flatnonzero(offset).tolist()]
    return [f"moved, as these shards left the start barrier before or after shard 0: {', '.join(moved)}"] if moved else []


def _updates(run: Run, pushes: LogRows, offset: np.ndarray) -> tuple[Updates, np.ndarray]:
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


def _evaluations(run: Run, after: int) -> Spans:
    """Place evaluations one after the other, none before its snapshot was taken, nor before nanosecond `after`."""
    rows = run.evaluations
    lengths = nanoseconds(rows["evaluate_s"])
    before = np.cumsum(lengths) - lengths
    start = before + np.maximum.accumulate(np.maximum(nanoseconds(rows["taken_s"]), after) - before)
    return Spans(rows, start, start + lengths)
