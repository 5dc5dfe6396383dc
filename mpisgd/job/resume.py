"""`mpisgd train --resume RUN`: the checkpoint to go on from, and changes allowed (DESIGN 6).

With a synchronous protocol, and as many learners and shards as before, a run ends with the bits of a run without interruption.
Otherwise, and for changed groups, slices are cut and mini-batches dealt anew (`records/checkpoint/recut.py`, `sampling.dealt_on`).
With other protocols nothing is applied twice: learner l goes on with the first mini-batch missing on any shard; other shards drop
repeated pushes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.errors import CheckpointError, ConfigError
from mpisgd.config import Config, config_file, options, replace
from mpisgd.data.sampling import dealt_on
from mpisgd.records import initial
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Checkpoint
from mpisgd.records.checkpoint.checkpoints import remove
from mpisgd.records.checkpoint.recut import Recut, recut, recut_snapshots
from mpisgd.records.log import schema
from mpisgd.records.log.continuing import check_rows
from mpisgd.records.log.reader import Run

#: Fields that may differ from the run's config.toml.
CHANGEABLE = (
    *("epochs", "checkpoint", "faults", "log", "data_dir", "nonfinite", "shards", "loggers", "callbacks", "binding"),
    *("stages", "group_size", "pipeline"),
)
_TOLD = (
    *("learners", "world_size", "hosts", "cores", "threads", "rules", "form", "versions", "command_line", "directory", "started"),
    *("way", "slices", "chunks", "brought", "git_commit", "git_dirty", "mpisgd_git_commit", "mpisgd_git_dirty"),
)


@dataclass(frozen=True)
class Resumption:
    """The way in which a run goes on; `attempts`: earlier entries of config.toml."""

    attempt: int
    checkpoint: Checkpoint
    attempts: list[dict[str, Any]]
    notes: list[str]

    @property
    def pinned(self) -> set[int]:
        """Clocks of checkpoints that replay needs."""
        return {self.checkpoint.clock} | {each["clock"] for each in self.attempts if "clock" in each}

    @property
    def begun(self) -> dict[int, int]:
        """Begin of each continued attempt, in clocks."""
        clocks = {each["attempt"]: each.get("clock", 0) for each in self.attempts}
        return {attempt: clocks.get(attempt, 0) for attempt in self.checkpoint.attempts}

    def attributes(self, rows: list[list[int]]) -> dict[str, Any]:
        """Return attributes of a log file after these rows (`schema`)."""
        own = {
            "attempt": self.attempt,
            "continues_clock": self.checkpoint.clock,
            "continues": np.array(rows, np.int64).reshape(-1, 1 + len(schema.TABLES)),
        }
        if not isinstance(self.checkpoint, Recut):
            return own
        return own | {
            "begins_samples": self.checkpoint.parts[0].account.samples,
            "begins_s": self.checkpoint.now_s,
            "begins_seq": np.array(self.checkpoint.next_seq, np.int64),
            "before": np.array(self.checkpoint.rows_before, np.int64),
        }

    @property
    def of_coordinator(self) -> dict[str, Any]:
        rows = np.array(self.checkpoint.coordinator["rows"], np.int64).reshape(-1, 1 + len(schema.COORDINATOR))
        return {"attempt": self.attempt, "continues_clock": self.checkpoint.clock, "continues": rows}

    @property
    def layout(self) -> int:
        """First attempt with these slices."""
        return self.attempt if isinstance(self.checkpoint, Recut) else self.checkpoint.attempts[0]

    @property
    def same_layout(self) -> bool:
        """Learners and shards never changed: the bits are then of an uninterrupted run."""
        return not isinstance(self.checkpoint, Recut) and self.layout == min(each["attempt"] for each in self.attempts)

    def environment(self, now: Mapping[str, Any], config: Config) -> dict[str, Any]:
        mine = {**_entry(now, config), "attempt": self.attempt}
        mine |= {"continues": self.checkpoint.attempt, "clock": self.checkpoint.clock}
        attempts = [*self.attempts, mine]
        begun = self.attempts[0].get("brought", {}).get(initial.NAME)  # the file may have changed, or be gone
        if begun is not None:
            now = {**now, "brought": {**now["brought"], initial.NAME: begun}}
        return {**now, "rules": min(each.get("rules", 1) for each in attempts), "attempts": attempts}


def check_changes(run: Path, config: Config) -> None:
    before = config_file.of_run(run)
    for item in options():
        old, new = getattr(before, item.name), getattr(config, item.name)
        if old != new and item.name not in CHANGEABLE:
            raise ConfigError(f"{item.name} = {new!r}: the run to be continued has {old!r}; may change: {', '.join(CHANGEABLE)}")
    if before.group_form == "partition" and config.group_size != before.group_size:
        why = "beside group_form = 'partition': the ranks' pieces of layers are not cut anew"
        raise ConfigError(f"group_size = {config.group_size}: expected {before.group_size} {why}")
    if config.sampling == "dealt" and config.epochs < before.epochs:  # more portions may have been dealt already
        had = f"the run to be continued has {before.epochs:g}"
        raise ConfigError(f"epochs = {config.epochs:g}: expected no fewer beside sampling = 'dealt': {had}")


def as_many_shards_as_ranks(run: Path, config: Config) -> Config:
    """Drop the number of shards if learners double as shards: started ranks decide."""
    if config.protocol.collective and config.shards == config_file.of_run(run).shards:
        return replace(config, shards=1)
    return config


def find(run: Path, config: Config, whole: Collection[int] = ()) -> Resumption:
    """Find the checkpoint to go on from. `whole`: clocks already checked.

    Raises CheckpointError if none can be loaded, DataError without a run, or with a damaged log.
    """
    notes: list[str] = []
    checkpoint = disk.newest(run, notes.append, whole)
    if config.protocol.batch and not checkpoint.coordinator:
        raise CheckpointError(
            f"{checkpoint.path} has weights alone, and no history: written by an earlier mpisgd; begin anew with these weights:"
            f" mpisgd export {run} WEIGHTS.pt --clock {checkpoint.clock}, then --init-from WEIGHTS.pt"
        )
    for part in checkpoint.parts:
        check_rows(run, part.account.shard, part.account.rows)
    environment = Run(run).environment
    attempts = environment.get("attempts") or [{**_entry(environment, config_file.read(run / schema.CONFIG)), "attempt": 0}]
    number = 1 + max(each["attempt"] for each in attempts)
    if not config.checkpoint.regular:
        notes.append("checkpoint.every_updates = 0: a checkpoint is written only where a signal interrupts the run")
    return Resumption(number, checkpoint, attempts, notes)


def forget_newer(run: Path, clock: int) -> None:
    for path in disk.directories(run):
        if disk.clock_of(path) > clock:
            remove(path)
    for name in (schema.ASIDE, f".{schema.LOG}.*", f".{schema.SPOOL}*"):  # left by a rank killed in the making
        for path in run.glob(name):
            path.unlink()


def lay_out(
    found: Resumption, config: Config, lambda_: int, bounds: list[tuple[int, int]], model: str, averaged: bool
) -> Resumption:
    """Fit a resumption to learners and slices, with a note of changes. Raises CheckpointError for another model."""
    checkpoint = found.checkpoint
    if checkpoint.model != model:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: parameters of the checkpoint {checkpoint.model}, here {model}"
        )
    before = [part.account.bounds for part in checkpoint.parts]
    if checkpoint.learners == lambda_ and before == bounds:
        return found
    begun = [max(wanted) for wanted in zip(*(part.account.next_seq for part in checkpoint.parts), strict=True)]
    cut_anew = recut(checkpoint, bounds, dealt_on(config.sampling, begun, lambda_))
    cut_anew = recut_snapshots(checkpoint.path.parent.parent, cut_anew, found.attempt, 2 if averaged else 1)
    were, are = _sizes(checkpoint.learners, len(before)), _sizes(lambda_, len(bounds))
    note = f"{were} until clock {checkpoint.clock:,}, {are} from here on: the bits differ from a run without interruption"
    return dataclasses.replace(found, checkpoint=cut_anew, notes=[*found.notes, note])


def slices_of(config: Config) -> tuple[int, ...] | None:
    """Return the run's sizes of slices, () = even; None for another number of shards."""
    run = Run(Path(config.out))
    return run.slices_of(run.attempt) if run.shards == config.shards else None


def _sizes(learners: int, shards: int) -> str:
    return f"{learners:,} learner{'s' * (learners > 1)} and {shards:,} shard{'s' * (shards > 1)}"


def check_teams(run: Path, teams: Sequence[Sequence[int]]) -> None:
    """Raise CheckpointError for other sizes of teams: data and divisors would change."""
    before, now = [len(team) for team in Run(run).teams], [len(team) for team in teams]
    if before and before != now:
        raise CheckpointError(f"{run} had teams of {before} ranks, here {now}: start as many ranks on each node as before")


def _entry(environment: Mapping[str, Any], config: Config) -> dict[str, Any]:
    own = {name: getattr(config, name) for name in ("shards", "group_size", "epochs")}
    own["stages_at"] = list(config.stages.at)
    return {**{name: environment[name] for name in _TOLD if name in environment}, **own}
