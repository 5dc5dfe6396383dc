"""What became of each run of a sweep, by its own marks: DONE, its lock, its checkpoints, and the last words of its ranks."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.job.interruption import newest
from mpisgd.records import lock
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Directory
from mpisgd.sweep.elements import FILE, Sweep, read

State = Literal["done", "diverged", "under way", "interrupted", "failed", "not begun"]

WORDS = ".out"
"""What follows an element's name in that of the file to which its ranks speak."""
_TAIL_BYTES = 1 << 16
_TELLING = re.compile(r"mpisgd( \w+)?: |(^|\W)[\w.]*(Error|Exception)(: |$)")
_LONGEST = 240


@dataclass(frozen=True)
class Outcome:
    """Where one element is; `reason`: why it is not done, in the words of its ranks; `clock`: that of its newest checkpoint."""

    name: str
    state: State
    reason: str = ""
    clock: int | None = None

    @property
    def is_done(self) -> bool:
        return self.state in ("done", "diverged")


def begin(file: Path, directory: Path) -> None:
    """Make the directory of a sweep, and keep the file there. Raises ConfigError where it cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, directory / FILE)
    except OSError as error:
        raise ConfigError(f"out = {str(directory)!r} cannot be made: {error}") from error


def of(directory: Path) -> tuple[Sweep, list[Outcome]]:
    """The runs of a sweep, and what became of each. Raises ConfigError where there is no sweep."""
    if not (directory / FILE).is_file():
        raise ConfigError(f"{directory} is no directory of a sweep: it has no {FILE}")
    sweep = read(directory / FILE)
    return sweep, [outcome(directory, each.name) for each in sweep.elements]


def left(file: Path, directory: Path) -> tuple[list[str], list[Outcome]]:
    """Names of the runs that are to go on, or begin, and those that somebody may be working on.

    Raises ConfigError where there is no sweep, or another one than the file's.
    """
    _, found = of(directory)
    if tomllib.loads(file.read_text("utf-8")) != tomllib.loads((directory / FILE).read_text("utf-8")):
        raise ConfigError(f"--resume {directory}: {file} is not the sweep that was begun there, {directory / FILE}")
    going = [each for each in found if not each.is_done]
    return [each.name for each in going if each.state != "under way"], [each for each in going if each.state == "under way"]


def outcome(directory: Path, name: str) -> Outcome:
    """What became of one element."""
    run = directory / name
    words = last_words(directory / f"{name}{WORDS}")
    if (run / schema.DONE).is_file():
        try:
            done = Directory(run).done or {}
        except DataError as error:
            return Outcome(name, "failed", str(error))
        return Outcome(name, "diverged" if done.get("diverged") else "done")
    try:
        lock.check(run)
    except ConfigError as error:
        return Outcome(name, "under way", str(error))
    if not run.exists():
        return Outcome(name, "failed" if words else "not begun", words)
    clock = newest(run)
    state: State = "interrupted" if "interrupted by" in words and clock is not None else "failed"
    return Outcome(name, state, words or "killed: there is no DONE, and nobody works on it", clock)


def last_words(path: Path) -> str:
    """The last line that says what went wrong, or else the last one; "" where there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or [""])[-1][:_LONGEST]
