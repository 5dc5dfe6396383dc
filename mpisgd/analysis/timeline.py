"""Spans of computing, waiting, sending and receiving, rank by rank on one clock, from a run's log alone.

Exact: length and order of a learner's activities (the last push is drawn to its last arrival); a shard's arrivals (headers left the
queue), answers, updates, events. Not logged: ends of receiving a slice and of sending an answer.
Reconstructed: a learner's place on the common clock. Each push begins as early as `cycles._bounds` and all other pushes allow, but
not after its arrival; spans of a rank never overlap. The clock is shard 0's; earlier activities are cut off.
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
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import appointed_of
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import LogRows, Verdict

#: Default limits of learners and pushes shown: viewers of traces grow slow.
MOST_LEARNERS = 256
MOST_PUSHES = 50_000


@dataclass(frozen=True)
class Ranks:
    """Rank and host of each role. `group`: ranks per learner; `learners` has all of them."""

    shards: Sequence[int]
    learners: Sequence[int]
    evaluator: int
    hosts: Sequence[str]
    group: int = 1

    @property
    def dedicated_evaluator(self) -> bool:
        return self.evaluator not in (self.learners[0], self.shards[0])

    def host(self, rank: int) -> str:
        return str(self.hosts[rank]) if rank < len(self.hosts) else "unknown host"


@dataclass(frozen=True)
class Window:
    start: int
    end: int

    def of(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.flatnonzero((end >= self.start) & (start <= self.end))


@dataclass(frozen=True)
class Spans:
    rows: LogRows
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Updates(Spans):
    """Spans of `updates`, with mean staleness; NaN = no gradients."""

    staleness: np.ndarray


@dataclass(frozen=True)
class Timeline:
    """A run, or its first learners, and the window to show.

    pushes: rows, learner by learner, shard by shard, in order.
    arrival, answer: (pushes,) int64; answer may be NO_ANSWER.
    cycle, update: (pushes,) int64; index of `cycles`, of `updates`, -1 = none.
    moment: nanoseconds of `events`.
    notes: cuts, a line each.
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
        evaluator = {self.ranks.evaluator: "evaluator"} if self.ranks.dedicated_evaluator else {}
        shown, group = self.ranks.learners[: self.learners], self.ranks.group
        learners = {rank: f"learner {at // group}{f', stage {at % group}' if group > 1 else ''}" for at, rank in enumerate(shown)}
        shards = {rank: f"shard {shard}" for shard, rank in enumerate(self.ranks.shards)}
        return shards | evaluator | learners

    def slack(self) -> str:
        shown = self.window.of(self.cycles.edges[:, 0], self.cycles.edges[:, -1])
        if len(shown) == 0:
            return "no learner's span lies in this window"
        median, most = np.percentile(self.cycles.slack[shown], (50, 99)) / 1e6
        late = f"up to {median:.3g} ms later (median; 99th percentile: {most:.3g} ms)"
        return f"learners' spans are drawn as early as the log allows; the true spans may be {late}"


def ranks_of(run: Run) -> Ranks:
    """Read ranks from [environment], else as `roles.assign` packs them.

    A team's leader stands for the learner. Shards on learners' ranks are numbered after all ranks, for rows of their own: both act
    at once.
    """
    environment = run.environment
    shards = [int(rank) for rank in environment.get("shard_ranks", range(run.shards))]
    given, hosts = int(environment.get("evaluator_rank", -1)), list(environment.get("hosts", []))

    def ranks(shards: list[int], learners: list[int], hosts: list[str], group: int = 1) -> Ranks:
        evaluator = shards[0] if appointed_of(run.path / schema.evaluator_file(run.attempt)) else given
        return Ranks(shards, learners, evaluator if evaluator >= 0 else learners[0], hosts, group)

    if about.doubled(run):
        return ranks([len(hosts) + rank for rank in shards], shards, [*hosts, *(hosts[rank] for rank in shards)])
    if run.teams:
        return ranks(shards, [team[0] for team in run.teams], hosts)
    if groups := about.groups_of(run):
        return ranks(shards, [rank for group in groups for rank in group], hosts, len(groups[0]))
    taken = {*shards, given}
    others = (rank for rank in itertools.count() if rank not in taken)
    return ranks(shards, list(itertools.islice(others, books.learners_of(run))), hosts)


def look(run: Run, *, from_s: float | None = None, to_s: float | None = None, learners: int | None = None) -> Timeline:
    """Return the timeline of the first `learners` learners.

    By default all, at most MOST_LEARNERS and MOST_PUSHES. A group's ranks have a row each; waits for neighbours are drawn behind
    all computing.

    Raises DataError: no push, several attempts, layerwise exchange, or groups of an earlier mpisgd; ConfigError: an impossible
    window.
    """
    if about.layerwise(run):
        raise DataError(f"{run.path}: no timeline: layers were pulled and pushed in the middle of computing")
    groups = len(about.groups_of(run)) > 0
    if groups and "neighbour_s" not in schema.extra("pushes", run.pushes.dtype):
        raise DataError(f"{run.path}: no timeline: this log of groups lacks the waits for neighbours")
    if to_s is not None and not (from_s or 0.0) <= to_s:
        raise ConfigError(f"--from-s {from_s or 0.0:g} --to-s {to_s:g}: expected an end no earlier than the start")
    if learners is not None and learners < 1:
        raise ConfigError(f"--learners {learners}: expected at least 1")
    all_learners = books.learners_of(run)
    shown = min(all_learners, learners or MOST_LEARNERS)
    notes: list[str] = []
    if shown < all_learners:
        notes.append(f"learners 0 to {shown - 1:,} of {all_learners:,}; choose their number by --learners")
    pushes = run.pushes[run.pushes["learner_id"] < shown]
    events = run.events
    if groups:  # each rank is drawn like a learner
        stage, group = _stages(run), len(about.groups_of(run)[0])
        pushes["learner_id"] = pushes["learner_id"] * group + stage[pushes["shard"]]
        events = events.copy()
        own = (events["learner_id"] >= 0) & (events["shard"] >= 0)
        events["learner_id"][own] = events["learner_id"][own] * group + stage[events["shard"][own]]
        shown *= group
    if len(pushes) == 0:
        raise DataError(f"{run.path}: no timeline: no gradient was pushed by learners 0 to {shown - 1:,}")
    if schema.backward_s(pushes).any():
        notes.append("computing while chunks of a gradient leave (backward_s) is drawn as a part of the push")
    pushes = pushes[np.lexsort((pushes["shard"], pushes["learner_id"]))]  # stable: keeps the order in time
    cycle = number_cycles(pushes, run.path)
    chains = chains_of(pushes, cycle)
    streamed = run.environment.get("way") == "streamed"  # headers leave before all chunks
    offset = offsets_of(pushes, cycle, chains, run.shards, together=streamed)
    arrival = nanoseconds(pushes["arrival_s"]) + offset[pushes["shard"]]
    answer = np.where(np.isnan(pushes["answer_s"]), NO_ANSWER, nanoseconds(pushes["answer_s"]) + offset[pushes["shard"]])
    cycles = cycles_of(pushes, cycle, chains, arrival, answer)
    updates, update = _updates(run, pushes, offset)
    ranks = ranks_of(run)
    before = cycles.learner_id == 0 if ranks.evaluator == ranks.learners[0] else cycles.learner_id >= 0
    after = 0 if ranks.dedicated_evaluator else int(cycles.edges[before, -1].max(initial=0))
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
    stages = run.environment["stages"]
    return np.repeat(np.arange(len(stages)), [len(shards) for shards in stages])


def _window(arrival: np.ndarray, end: int, from_s: float | None, to_s: float | None) -> tuple[Window, list[str]]:
    if from_s is not None and not 1e9 * from_s <= end:
        raise ConfigError(f"--from-s {from_s:g}: expected a number up to {end / 1e9:g}, the end of the log")
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
    rows = run.evaluations
    lengths = nanoseconds(rows["evaluate_s"])
    before = np.cumsum(lengths) - lengths
    start = before + np.maximum.accumulate(np.maximum(nanoseconds(rows["taken_s"]), after) - before)
    return Spans(rows, start, start + lengths)
