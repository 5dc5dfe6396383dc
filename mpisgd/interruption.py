"""The end of a run that a signal has interrupted (`signals.py`): which checkpoint there is, and what the user is told."""

from __future__ import annotations

import shlex
from pathlib import Path

from mpisgd import ulfm
from mpisgd.errors import CheckpointError
from mpisgd.records import checkpoint as disk
from mpisgd.signals import name_of


def farewell(run: Path, signal: int, clocks: tuple[int, ...], ranks: int) -> str:
    """The last line of an interrupted run, on its first rank, when all shards have written what they had.

    Raises CheckpointError where no checkpoint is complete.
    """
    clock, saved = max(clocks), newest(run)
    said = f"interrupted by {name_of(signal)} at clock {clock:,}"
    if saved is None:
        raise CheckpointError(f"{said}, and {run} has no checkpoint that is complete: begin anew with --overwrite")
    lost = "nothing is lost" if saved == clock else f"{clock - saved:,} updates are lost"
    command = f"{ulfm.launcher(ranks)} mpisgd train --resume {shlex.quote(str(run))}"
    return f"mpisgd: {said}, checkpoint at clock {saved:,} ({lost}); go on with: {command}"


def newest(run: Path) -> int | None:
    """The clock of the newest checkpoint with a manifest; whether each byte of it is whole, who loads it finds out."""
    for path in disk.directories(run):
        try:
            return disk.read(path).clock
        except CheckpointError:
            continue
    return None
