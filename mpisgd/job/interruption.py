"""End of a run interrupted by a signal (`signals.py`)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mpisgd.base.errors import CheckpointError, MpisgdError
from mpisgd.comm.signals import name_of
from mpisgd.config import config_file
from mpisgd.records.checkpoint import checkpoint as disk


def farewell(run: Path, signal: int, clocks: tuple[int, ...], command: str) -> str:
    """Return the last line of an interrupted run. Raises CheckpointError if no checkpoint is complete."""
    clock, saved = max(clocks), newest(run)
    said = f"interrupted by {name_of(signal)} at clock {clock:,}"
    if saved is None:
        raise CheckpointError(f"{said}, and {run} has no complete checkpoint: {_without(run, command)}")
    lost = "nothing is lost" if saved == clock else f"{clock - saved:,} updates are lost"
    return f"mpisgd: {said}, checkpoint at clock {saved:,} ({lost}); go on with: {command}"


def last_words(run: Path, signal: int, command: str) -> str:
    """Return last words, for a launcher that kills its ranks a quarter of a second later."""
    saved = newest(run)
    if saved is None:
        until = f"{run} has no checkpoint: {_without(run, command)}"
    else:
        until = f"the newest checkpoint is of clock {saved:,}; go on with: {command}"
    return (
        f"\nmpisgd: the launcher ends the job ({name_of(signal)}): writing a checkpoint;"
        f" if no other line follows, there was not the time, and {until}"
    )


def _without(run: Path, command: str) -> str:
    return f"go on from the newest state held by nodes with: {command}" if keeps_near(run) else "begin anew with --overwrite"


def keeps_near(run: Path) -> bool:
    """Return whether nodes may hold states of a run."""
    try:
        return config_file.of_run(run).checkpoint.partner_updates > 0
    except MpisgdError:
        return False


def tell_terminal(text: str) -> bool:
    """Write to the launcher's terminal: the launcher passes nothing on any more. False if there is none."""
    with contextlib.suppress(OSError), Path("/dev/tty").open("w") as terminal:
        terminal.write(f"{text}\n")
        return True
    return False


def newest(run: Path) -> int | None:
    """Return the clock of the newest manifest; other files are not read."""
    for path in disk.directories(run):
        try:
            return disk.read(path).clock
        except CheckpointError:
            continue
    return None
