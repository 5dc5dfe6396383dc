"""Record of a run from its log, shard by shard, in the order in which each shard did it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.config import Config, config_file
from mpisgd.job import parts
from mpisgd.protocols import Protocol
from mpisgd.records.log import schema
from mpisgd.records.log.layouts import begins
from mpisgd.records.log.rank_file import read_continues, read_summary, read_tables
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.begun import Start, begun
from mpisgd.replay.checks.lost import Lost, completed
from mpisgd.rules.portions import NO_PORTION

_CHUNK_ROWS = 4096
_CAME_OR_WENT = (Event.DEPARTED, Event.LOST, Event.MISSED, Event.RETURNED, Event.PASSED)


class Row(NamedTuple):
    """The columns of `schema.PUSHES` that say what was done."""

    shard: int
    clock: int
    timestamp: int
    staleness: int
    learner_id: int
    seq: int
    samples: int
    gradients: int
    verdict: int
    reason: int
    weight: float
    learning_rate: float
    arrival_s: float
    answer_s: float
    loss: float
    portion: int = NO_PORTION

    @classmethod
    def columns(cls, dtype: np.dtype) -> list[str]:
        """Those that a log has: `portion` only where data are dealt."""
        return [name for name in cls._fields if name in (dtype.names or ())]


class Departure(NamedTuple):
    """A learner left while others went on; `clock` is that of the shard before, `time_s` is after all that arrived before.

    It said so, or was lost, or missed. Or, as `kind` has it, one that was missed is back (RETURNED), or one passes (PASSED).
    """

    clock: int
    time_s: float
    learner_id: int
    kind: int = Event.DEPARTED


class TimeOut(NamedTuple):
    """The time for update `clock` + 1 was over."""

    clock: int
    time_s: float


@dataclass(frozen=True)
class ShardRecord:
    """The log of one shard, of one attempt.

    Attributes:
        pushes: dtype `schema.PUSHES`, in the order of summation; of a shard that did not leave in order, as far as it says
            what became of them: of clocks up to that of the last update that is recorded.
        updates: dtype `schema.UPDATES`.
        summary: the shard's last words, dtype `schema.SUMMARY`, `final_clock` -1 where it did not leave in order.
    """

    shard: int
    lambda_: int
    pushes: LogRows
    updates: LogRows
    departures: list[Departure]
    timeouts: list[TimeOut]
    summary: np.void
    start: Start
    lost: dict[int, Lost] = dataclasses.field(default_factory=dict)
    stuck: frozenset[int] = frozenset()
    """Learners a transfer with which was given up."""
    inserted: frozenset[int] = frozenset()
    """Numbers of rows that the shard never had: of gradients of lost learners that came to other shards alone."""
    events: LogRows = dataclasses.field(default_factory=lambda: np.empty(0, schema.EVENTS))
    """dtype `schema.EVENTS`, in the order in which they happened."""

    @property
    def finished(self) -> bool:
        """Whether the shard left in order, so that its log is whole."""
        return bool(self.summary["final_clock"] >= 0)

    @property
    def enough(self) -> bool:
        """Whether it was told to end before its samples were applied, for evaluations were no better any more."""
        return Event.ENOUGH in self.events["kind"]

    @property
    def final_clock(self) -> int:
        return self.start.clock + len(self.updates)

    @property
    def final_samples(self) -> int:
        return int(self.updates["samples"][-1]) if len(self.updates) else self.start.samples

    @property
    def final_s(self) -> float:
        """Second at which the last update was done."""
        return float(self.updates["time_s"][-1]) if len(self.updates) else self.start.time_s

    def update(self, clock: int) -> np.void:
        """The row of the update that made this clock."""
        row: np.void = self.updates[clock - 1 - self.start.clock]
        return row

    def rows(self) -> Iterator[Row]:
        """All rows as plain Python numbers, a chunk in memory at a time."""
        chosen = self.pushes[Row.columns(self.pushes.dtype)]
        for start in range(0, len(chosen), _CHUNK_ROWS):
            yield from itertools.starmap(Row, chosen[start : start + _CHUNK_ROWS].tolist())

    def row(self, number: int) -> Row:
        return Row(*self.pushes[number][Row.columns(self.pushes.dtype)].item())

    def scale_of(self, number: int) -> float:
        """By what the loss of a gradient was multiplied; NaN where the log does not say."""
        return float(self.pushes["scale"][number]) if "scale" in schema.extra(self.pushes.dtype) else math.nan

    @cached_property
    def rows_of(self) -> list[LogRows]:
        """Per learner the numbers of its rows, in their order; learner_ids must be in range."""
        learners = self.pushes["learner_id"]
        counts = np.bincount(learners, minlength=self.lambda_)
        return np.split(np.argsort(learners, kind="stable"), np.cumsum(counts)[:-1])

    @cached_property
    def events_of(self) -> list[LogRows]:
        """Per learner its rows of `events`."""
        order = np.argsort(self.events["learner_id"], kind="stable")
        ends = np.searchsorted(self.events["learner_id"][order], np.arange(self.lambda_ + 1))
        return [self.events[order[start:end]] for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class Record:
    """The log of a run and the configuration that it had; where it was continued, of one attempt.

    `earlier` are those attempts that this one continues, one after the other, each to the clock at which the next begins, and as
    far beyond as its files go: what shards did there after the checkpoint may have come into the slices of others before theirs.

    A learner pushes each gradient to all shards, and shards keep the order of one learner's pushes: so a gradient is named by
    (learner_id, number), and the number of a row is the same on all shards. `seq` is no such name: a mini-batch that was
    rejected is computed again under its old one.
    """

    run: Run
    config: Config
    shards: list[ShardRecord]
    done: dict[str, Any] | None
    """Entries of DONE; None = the run did not finish."""
    attempt: int = 0
    earlier: tuple[Record, ...] = ()
    learners: int = 0
    """Learners of this attempt; 0 = as many as the run's last."""
    recut: bool = False
    """Whether slices, or mini-batches, were cut and dealt anew at its beginning."""

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def lambda_(self) -> int:
        return self.learners or self.run.lambda_

    @cached_property
    def members(self) -> list[list[int]]:
        """Numbers of the ranks that compute for each learner (`Roles.number`): its own, unless it is a team.

        Raises DataError where the run does not say who is in which team.
        """
        if not self.config.in_teams:
            return [[learner_id] for learner_id in range(self.lambda_)]
        teams = self.run.teams
        ranks = sorted(rank for team in teams for rank in team)
        if len(teams) != self.lambda_ or not all(teams) or len(set(ranks)) != len(ranks):
            expected = f"the ranks of {self.lambda_} learners, each once"
            raise DataError(f"{self.path / schema.CONFIG}: [environment] teams = {teams!r}, expected {expected}")
        return [[ranks.index(rank) for rank in team] for team in teams]

    @property
    def next_seq(self) -> list[int]:
        """Per learner, its first mini-batch here: the first that any shard wants."""
        return [min(wanted) for wanted in zip(*(shard.start.next_seq for shard in self.shards), strict=True)]

    @property
    def start_clock(self) -> int:
        """At which all shards begin."""
        return self.shards[0].start.clock

    @property
    def ranks(self) -> int:
        """Number of ranks that compute gradients."""
        return sum(map(len, self.members))

    @property
    def gradients_per_update(self) -> float:
        """Number of gradients that normally make one update, at the start."""
        return parts.gradients_per_update(self.protocol(), self.lambda_, self.ranks)

    @property
    def whole(self) -> bool:
        """Whether nothing is missing at the end of any shard's log."""
        return all(shard.finished for shard in self.shards)

    @property
    def computed(self) -> bool:
        """Whether gradients were computed: on a virtual cluster perhaps only sizes travelled."""
        return self.config.virtual.gradients or not self.run.environment.get("virtual", False)

    def environment(self, name: str) -> int:
        """A number that the run wrote beside its configuration. Raises DataError where it did not."""
        number = self.run.environment.get(name)
        if not isinstance(number, int):
            raise DataError(f"{self.path / schema.CONFIG}: [environment] {name} = {number!r}, expected a number")
        return number

    @property
    def rules(self) -> int:
        """The version of the rules that this attempt follows (`schema.RULES`)."""
        rules = self.run.told(self.attempt).get("rules", self.run.environment.get("rules", 1))
        return rules if isinstance(rules, int) else 1

    @property
    def older(self) -> bool:
        """Whether the run, or an attempt of it, follows the first rules (`schema.RULES`)."""
        return bool(self.run.environment.get("rules", 1) == 1)

    def protocol(self) -> Protocol:
        """A new one, as each shard began with. Raises ConfigError where it does not fit the number of learners."""
        protocol = self.config.protocol.make(self.lambda_)
        if self.attempt:
            protocol.on_resume(self.next_seq)
        return protocol

    def has_gradient(self, learner_id: int, number: int) -> bool:
        """Whether all shards' logs have this push."""
        return all(number < len(shard.rows_of[learner_id]) for shard in self.shards)


def read(path: str | Path) -> Record:
    """The last attempt, with those that it continues.

    Raises DataError where there is no run or no log of it that can be read, ConfigError where its configuration cannot.
    """
    run = Run(path)
    done = run.done
    chain = _chain(run, run.attempt) if run.summaries.size else []
    earlier = tuple(_attempt(run, attempt, None) for attempt in chain)
    return dataclasses.replace(_attempt(run, run.attempt, done), earlier=earlier)


def _chain(run: Run, attempt: int) -> list[int]:
    """The attempts that this one continues, also those of other layouts, the first one first."""
    path = run.path / schema.shard_file(0, attempt)
    own = [before for before, _ in read_continues(path)]
    older = [before for shard, before, _ in begins(path).before if shard == 0]
    return [*_chain(run, older[-1]), older[-1], *own] if older else own


def _attempt(run: Run, attempt: int, done: dict[str, Any] | None) -> Record:
    config = config_file.from_mapping(run.config)
    told = run.told(attempt)
    learners, shards_of = told.get("learners", run.lambda_), told.get("shards", run.shards)
    size, begin = told.get("group_size", config.group_size), tuple(told.get("stages_at", config.stages.at))
    cut = dataclasses.replace(config.stages, at=begin)
    epochs = told.get("epochs", config.epochs)
    config = dataclasses.replace(config, epochs=epochs, shards=shards_of, group_size=size, stages=cut)
    summaries = {}
    for shard in range(shards_of):
        for summary in read_summary(run.path / schema.shard_file(shard, attempt)):
            summaries[int(summary["shard"])] = summary
    shards = completed([_shard(run, shard, attempt, summaries.get(shard), learners) for shard in range(shards_of)])
    path = run.path / schema.shard_file(0, attempt)
    recut = bool(begins(path).before) and not read_continues(path)
    return Record(run, config, shards, done, attempt, learners=learners, recut=recut)


def _shard(run: Run, shard: int, attempt: int, summary: np.void | None, lambda_: int) -> ShardRecord:
    """By file, not by the column `shard`, which is one of those in doubt."""
    path = run.path / schema.shard_file(shard, attempt)
    if summary is None:
        raise DataError(f"{path} is not the file of shard {shard}: its summary names another")
    pushes, updates, events = read_tables(path, ("pushes", "updates", "events"))
    start = begun(path, lambda_, events)
    if summary["final_clock"] < 0:
        # The rows after the last update that was flushed; and what was logged while the updates beside it were not.
        pushes, events = (rows[rows["clock"] <= start.clock + len(updates)] for rows in (pushes, events))
    columns = ["clock", "time_s", "learner_id"]
    came_or_went = events[np.isin(events["kind"], _CAME_OR_WENT)]
    departures = [Departure._make(row) for row in came_or_went[[*columns, "kind"]].tolist()]
    lost = {
        learner_id: Lost(clock, time_s, int(given))
        for clock, time_s, learner_id, given in _of(events, Event.LOST, *columns, "value")
    }
    stuck = frozenset(learner_id for (learner_id,) in _of(events, Event.STUCK, "learner_id"))
    timeouts = [TimeOut(*row) for row in _of(events, Event.TIMEOUT, "clock", "time_s")]
    return ShardRecord(shard, lambda_, pushes, updates, departures, timeouts, summary, start, lost, stuck, events=events)


def _of(events: LogRows, kind: Event, *columns: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = events[events["kind"] == kind][list(columns)].tolist()
    return rows
