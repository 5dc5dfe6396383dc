"""Record of a run's log, shard by shard, in each shard's order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.config import Config, config_file
from mpisgd.exchange.ways import why_not
from mpisgd.protocols import Protocol
from mpisgd.records.log import schema
from mpisgd.records.log.continuing import begins, continued
from mpisgd.records.log.rank_file import attempt_of, read_summary, read_tables
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.begun import Start, begun
from mpisgd.rules.portions import NO_PORTION


class Row(NamedTuple):
    """Columns of `schema.PUSHES` about decisions."""

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
        return [name for name in cls._fields if name in (dtype.names or ())]


class Lost(NamedTuple):
    """Loss of a learner; `given`: clock of its last weights."""

    clock: int
    time_s: float
    given: int


@dataclass(frozen=True)
class ShardRecord:
    """The log of a shard in an attempt.

    `pushes` are in order of summation; unless `finished`, to the clock of the last recorded update. `lacks`: lost learners; other
    shards got one push more.
    """

    shard: int
    lambda_: int
    pushes: LogRows
    updates: LogRows
    summary: np.void
    start: Start
    lost: dict[int, Lost] = dataclasses.field(default_factory=dict)
    lacks: frozenset[int] = frozenset()
    events: LogRows = dataclasses.field(default_factory=lambda: np.empty(0, schema.EVENTS))

    @property
    def finished(self) -> bool:
        """The shard left in order, with a whole log."""
        return bool(self.summary["final_clock"] >= 0)

    @property
    def enough(self) -> bool:
        """Evaluations ended training early."""
        return Event.ENOUGH in self.events["kind"]

    @property
    def final_clock(self) -> int:
        return self.start.clock + len(self.updates)

    @property
    def final_samples(self) -> int:
        return int(self.updates["samples"][-1]) if len(self.updates) else self.start.samples

    @property
    def final_s(self) -> float:
        return float(self.updates["time_s"][-1]) if len(self.updates) else self.start.time_s

    def update(self, clock: int) -> np.void:
        row: np.void = self.updates[clock - 1 - self.start.clock]
        return row

    def row(self, number: int) -> Row:
        return Row(*self.pushes[number][Row.columns(self.pushes.dtype)].item())

    @cached_property
    def rows_of(self) -> list[LogRows]:
        """Row numbers per learner; learner_ids must be in range."""
        learners = self.pushes["learner_id"]
        counts = np.bincount(learners, minlength=self.lambda_)
        return np.split(np.argsort(learners, kind="stable"), np.cumsum(counts)[:-1])

    @cached_property
    def events_of(self) -> list[LogRows]:
        order = np.argsort(self.events["learner_id"], kind="stable")
        ends = np.searchsorted(self.events["learner_id"][order], np.arange(self.lambda_ + 1))
        return [self.events[order[start:end]] for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class Record:
    """Log and configuration of a run, or of an attempt of a continued run.

    `earlier`: attempts before, each to the end of its files, beyond the next attempt's clock: a shard's work after its checkpoint
    may have entered other shards' slices before theirs.

    A gradient's name is (learner_id, number), the same on all shards: a learner pushes to all shards, and shards keep its order.
    `seq` is no name: a rejected mini-batch is computed again under its seq.
    """

    run: Run
    config: Config
    shards: list[ShardRecord]
    done: dict[str, Any] | None
    """None = unfinished."""
    attempt: int = 0
    earlier: tuple[Record, ...] = ()
    learners: int = 0
    """0 = as in the last attempt."""
    recut: bool = False
    """Slices were cut, or mini-batches dealt, anew."""

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def lambda_(self) -> int:
        return self.learners or self.run.lambda_

    @cached_property
    def members(self) -> list[list[int]]:
        """Numbers of each learner's ranks (`Roles.number`): its own, or its team's.

        Raises DataError: teams unknown.
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
        """First mini-batch wanted by any shard, per learner."""
        return [min(wanted) for wanted in zip(*(shard.start.next_seq for shard in self.shards), strict=True)]

    @property
    def start_clock(self) -> int:
        return self.shards[0].start.clock

    @property
    def ranks(self) -> int:
        return sum(map(len, self.members))

    @property
    def whole(self) -> bool:
        return all(shard.finished for shard in self.shards)

    @property
    def computed(self) -> bool:
        """Gradients were computed; a virtual cluster may send only sizes."""
        return self.config.virtual.gradients or not self.run.environment.get("virtual", False)

    def environment(self, name: str) -> int:
        """Return a number of [environment]. Raises DataError: no number."""
        number = self.run.environment.get(name)
        if not isinstance(number, int):
            raise DataError(f"{self.path / schema.CONFIG}: [environment] {name} = {number!r}, expected a number")
        return number

    @property
    def rules(self) -> int:
        rules = self.run.entries_of(self.attempt).get("rules", self.run.environment.get("rules", 1))
        return rules if isinstance(rules, int) else 1

    @property
    def older(self) -> bool:
        """Any attempt follows the first rules (`schema.RULES`)."""
        return bool(self.run.environment.get("rules", 1) == 1)

    def protocol(self) -> Protocol:
        """Return a new protocol. Raises ConfigError: unfit number of learners."""
        protocol = self.config.protocol.make(self.lambda_)
        if self.attempt:
            protocol.on_resume(self.next_seq)
        return protocol


def read(path: str | Path) -> Record:
    """Return the last attempt, with earlier attempts.

    Raises DataError: no readable run or log. Raises ConfigError: unreadable configuration.
    """
    run = Run(path)
    done = run.done
    chain = _chain(run, run.attempt) if run.summaries.size else []
    earlier = tuple(_attempt(run, attempt, None) for attempt in chain)
    return dataclasses.replace(_attempt(run, run.attempt, done), earlier=earlier)


def _chain(run: Run, attempt: int) -> list[int]:
    """Return continued attempts, also of other layouts, oldest first."""
    path = run.path / schema.shard_file(0, attempt)
    own = [attempt_of(each.path) for each in continued(path)[:-1]]
    older = [attempt_of(each.path) for shard in begins(path).before[:1] for each in shard]
    return [*_chain(run, older[-1]), older[-1], *own] if older else own


def _attempt(run: Run, attempt: int, done: dict[str, Any] | None) -> Record:
    config = config_file.from_mapping(run.config)
    told = run.entries_of(attempt)
    learners, shards_of = told.get("learners", run.lambda_), told.get("shards", run.shards)
    size, begin = told.get("group_size", config.group_size), tuple(told.get("stages_at", config.stages.at))
    epochs, way = told.get("epochs", config.epochs), told.get("way", run.environment.get("way", "whole"))
    cuts: dict[str, Any] = {"slices": run.slices_of(attempt), "chunks": run.chunks_of(attempt)}
    cuts["stages"] = dataclasses.replace(config.stages, at=begin)
    config = dataclasses.replace(config, epochs=epochs, way=way, shards=shards_of, group_size=size, **cuts)
    expected = [each for each, why in why_not(config).items() if not why]
    if way not in expected:
        raise DataError(f"{run.path / schema.CONFIG}: [environment] way = {way!r}, expected {' or '.join(expected)}")
    summaries = {}
    for shard in range(shards_of):
        for summary in read_summary(run.path / schema.shard_file(shard, attempt)):
            summaries[int(summary["shard"])] = summary
    found = [_shard(run, shard, attempt, summaries.get(shard), learners) for shard in range(shards_of)]
    shards = [_completed(shard, found) for shard in found]
    path = run.path / schema.shard_file(0, attempt)
    recut = bool(begins(path).before) and len(continued(path)) == 1
    return Record(run, config, shards, done, attempt, learners=learners, recut=recut)


def _shard(run: Run, shard: int, attempt: int, summary: np.void | None, lambda_: int) -> ShardRecord:
    """Return a record by file, not by the doubtful column `shard`."""
    path = run.path / schema.shard_file(shard, attempt)
    if summary is None:
        raise DataError(f"{path} is not the file of shard {shard}: the summary names another shard")
    pushes, updates, events = read_tables(path, ("pushes", "updates", "events"))
    start = begun(path, lambda_, events)
    if summary["final_clock"] < 0:
        # Drop rows after the last flushed update, and events flushed before their updates.
        pushes, events = (rows[rows["clock"] <= start.clock + len(updates)] for rows in (pushes, events))
    gone = events[events["kind"] == Event.LOST]
    lost = {row["learner_id"].item(): Lost(row["clock"].item(), row["time_s"].item(), int(row["value"])) for row in gone}
    return ShardRecord(shard, lambda_, pushes, updates, summary, start, lost, events=events)


def _completed(shard: ShardRecord, shards: list[ShardRecord]) -> ShardRecord:
    """Note lost learners whose last push came to other shards only."""
    lacks = [each for each in shard.lost if any(len(other.rows_of[each]) == len(shard.rows_of[each]) + 1 for other in shards)]
    return dataclasses.replace(shard, lacks=frozenset(lacks))
