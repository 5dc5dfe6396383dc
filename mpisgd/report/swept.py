"""A sweep at its end: all its runs side by side, and those that are not done, each with its reason."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mpisgd.analysis.tables import Table, columns_of
from mpisgd.analysis.training import Target
from mpisgd.base.errors import DataError
from mpisgd.records.log.reader import Run
from mpisgd.report.compare import compare
from mpisgd.report.writing import say, terminal, write
from mpisgd.sweep import outcomes
from mpisgd.sweep.elements import Sweep
from mpisgd.sweep.outcomes import Outcome


def compare_sweep(directory: Path, out: Path, console: Console | None = None, target: Target | None = None) -> bool:
    """Print and write what `compare` does of the runs that are done, and a table of all; whether all are done.

    Raises ConfigError where it is no directory of a sweep, or `out` cannot be written.
    """
    console = console or terminal()
    sweep, found = outcomes.of(directory)
    every = _table(sweep, found)
    paths = [directory / each.name for each in found if each.is_done and _can_be_read(directory / each.name)]
    if paths:
        compare(paths, out, console, [every], target)
    else:
        write(out / "compare.md", "Sweep", [f"{len(found)} runs, none done"], [every], ())
    going = [each for each in found if not each.is_done]
    say(console, f"{len(found) - len(going)} of {len(found)} runs of the sweep are done")
    for each in going:
        say(console, f"  {each.name}: {each.state}{_of(each)}")
    if going:
        say(console, f"go on with these alone: --resume {directory}, with the file of the sweep, by mpisgd run, submit or simulate")
    return not going


def _table(sweep: Sweep, found: list[Outcome]) -> Table:
    """All runs, each with its settings, where it is, and why."""
    keys = list(dict.fromkeys(key for each in sweep.elements for key in each.settings))
    rows = tuple(
        (each.name, *(_cell(each.settings.get(key)) for key in keys), one.state, one.clock, one.reason)
        for each, one in zip(sweep.elements, found, strict=True)
    )
    columns = columns_of(" | ".join(["run", *keys, "state", "checkpoint", "reason"]))
    return Table("sweep", "Runs of the sweep", columns, rows, "checkpoint: the clock of the newest, of what is not done.")


def _cell(value: object) -> str | None:
    return None if value is None else str(value)


def _of(each: Outcome) -> str:
    saved = "" if each.clock is None else f"; checkpoint of clock {each.clock:,}"
    return f": {each.reason}{saved}" if each.reason else saved


def _can_be_read(path: Path) -> bool:
    try:
        Run(path)
    except DataError:
        return False
    return True
