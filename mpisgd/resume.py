"""`mpisgd train --resume RUN`: which checkpoint a run goes on from, and what may be different this time (DESIGN 6).

For synchronous protocols a run that was interrupted ends with the bits of one that was not. For others nothing that was applied is
applied again: learner l goes on with the first mini-batch that any shard has not had, and a shard that has drops it as repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd import config_file
from mpisgd.config import Config, replace
from mpisgd.errors import CheckpointError, ConfigError, DataError
from mpisgd.finish import Outcome
from mpisgd.records import checkpoint as disk
from mpisgd.records import schema
from mpisgd.records.checkpoint import Checkpoint
from mpisgd.records.checkpoints import remove
from mpisgd.records.reader import Run

#: What may be another than in the run's config.toml.
CHANGEABLE = ("epochs", "checkpoint", "faults", "log", "data_dir", "nonfinite")
_TOLD = ("learners", "world_size", "hosts", "threads", "form", "versions", "git_commit", "command_line", "started")


@dataclass(frozen=True)
class Resumption:
    """How a run goes on.

    Attributes:
        attempt: the number of this attempt.
        checkpoint: from which it goes on.
        attempts: what config.toml is to say of those before.
        notes: what the user is to be told.
    """

    attempt: int
    checkpoint: Checkpoint
    attempts: list[dict[str, Any]]
    notes: list[str]

    @property
    def pinned(self) -> set[int]:
        """Clocks of the checkpoints that replay needs."""
        return {self.checkpoint.clock} | {each["clock"] for each in self.attempts if "clock" in each}

    def attributes(self, rows: list[list[int]]) -> dict[str, Any]:
        """Those of a log file of this attempt, before which come these rows (`schema`)."""
        return {
            "attempt": self.attempt,
            "continues_clock": self.checkpoint.clock,
            "continues": np.array(rows, np.int64).reshape(-1, 1 + len(schema.TABLES)),
        }

    def environment(self, now: Mapping[str, Any], config: Config) -> dict[str, Any]:
        """The table [environment] of config.toml, where `now` is that of this attempt alone."""
        mine = {**_entry(now, config), "attempt": self.attempt}
        mine |= {"continues": self.checkpoint.attempt, "clock": self.checkpoint.clock}
        return {**now, "attempts": [*self.attempts, mine]}


def configuration(run: Path) -> Config:
    """That of the run, which goes on in the directory where it is now. Raises ConfigError where there is no run."""
    return replace(config_file.read(run / schema.CONFIG), out=str(run), overwrite=False)


def check_changes(run: Path, config: Config) -> None:
    """Raises ConfigError where something differs from the run's own configuration that may not."""
    before = configuration(run)
    for item in dataclasses.fields(Config):
        old, new = getattr(before, item.name), getattr(config, item.name)
        if old != new and item.name not in CHANGEABLE:
            raise ConfigError(
                f"{item.name} = {new!r}: the run that is to be continued has {old!r}; what may change is {', '.join(CHANGEABLE)}"
            )


def finished(run: Path) -> Outcome | None:
    """How the run ended, where it did. Raises DataError where what it says of that is damaged."""
    done = Run(run).done
    if done is None:
        return None
    try:
        return Outcome(run, tuple(done["clock"]), tuple(done["samples"]), bool(done["diverged"]), float(done["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{run / schema.DONE} is damaged: {error}") from error


def find(run: Path, config: Config) -> Resumption:
    """Which checkpoint to go on from. Raises CheckpointError where none can be loaded, DataError where there is no run."""
    notes: list[str] = []
    checkpoint = disk.newest(run, notes.append)
    environment = Run(run).environment
    attempts = environment.get("attempts") or [{**_entry(environment, config_file.read(run / schema.CONFIG)), "attempt": 0}]
    number = 1 + max(each["attempt"] for each in attempts)
    if config.checkpoint.every_updates == 0:
        notes.append("checkpoint.every_updates = 0: a checkpoint is written only where a signal interrupts the run")
    return Resumption(number, checkpoint, attempts, notes)


def forget_newer(run: Path, clock: int) -> None:
    """Remove what there is of checkpoints after the one that the run goes on from: they are written again."""
    for path in disk.directories(run):
        if int(path.name.removeprefix("clock-")) > clock:
            remove(path)


def check_layout(checkpoint: Checkpoint, lambda_: int, bounds: list[tuple[int, int]], model: str) -> None:
    """Raises CheckpointError where the checkpoint is of another model, or of another number of learners or shards."""
    if checkpoint.model != model:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: its parameters are {checkpoint.model}, here they are {model}"
        )
    theirs = (checkpoint.learners, len(checkpoint.parts))
    if theirs != (lambda_, len(bounds)):
        raise CheckpointError(
            f"{checkpoint.path} was written by {theirs[0]} learners and {theirs[1]} shard(s), here are {lambda_} and"
            f" {len(bounds)}: start as many ranks as before"
        )
    if [part.account.bounds for part in checkpoint.parts] != bounds:
        raise CheckpointError(f"{checkpoint.path} has slices that are cut elsewhere than here")


def check_teams(run: Path, teams: Sequence[Sequence[int]]) -> None:
    """Raises CheckpointError where learners were teams of other numbers of ranks: their data and divisors would change."""
    before, now = [len(team) for team in Run(run).teams], [len(team) for team in teams]
    if before and before != now:
        raise CheckpointError(f"{run} had teams of {before} ranks, here they are {now}: start as many ranks on each node as before")


def _entry(environment: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """What is kept of one attempt."""
    return {**{name: environment[name] for name in _TOLD if name in environment}, "shards": config.shards, "epochs": config.epochs}
