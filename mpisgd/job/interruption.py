"""The end of a run that a signal has interrupted (`signals.py`): which checkpoint there is, and what the user is told."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mpisgd.base.errors import CheckpointError, MpisgdError
from mpisgd.comm.signals import name_of
from mpisgd.config import config_file
from mpisgd.records.checkpoint import checkpoint as disk


def farewell(run: Path, signal: int, clocks: tuple[int, ...], command: str) -> str:
    """The last line of an interrupted run, on its first rank, when all shards have written what they had; `command` goes on.

    Raises CheckpointError where no checkpoint in the run's directory is complete.
    """
    clock, saved = max(clocks), newest(run)
    said = f"interrupted by {name_of(signal)} at clock {clock:,}"
    if saved is None:
        raise CheckpointError(f"{said}, and {run} has no checkpoint that is complete: {_without(run, command)}")
    lost = "nothing is lost" if saved == clock else f"{clock - saved:,} updates are lost"
    return f"mpisgd: {said}, checkpoint at clock {saved:,} ({lost}); go on with: {command}"


def last_words(run: Path, signal: int, command: str) -> str:
    """Text to print at once where the launcher kills its ranks a quarter of a second later, and there may be no farewell."""
    saved = newest(run)
    if saved is None:
        until = f"{run} has none: {_without(run, command)}"
    else:
        until = f"the newest is that of clock {saved:,}; go on with: {command}"
    return (
        f"\nmpisgd: the launcher ends the job ({name_of(signal)}): writing a checkpoint;"
        f" if no other line follows, there was not the time, and {until}"
    )


def _without(run: Path, command: str) -> str:
    return f"go on from the newest state that nodes hold with: {command}" if keeps_near(run) else "begin anew with --overwrite"


def keeps_near(run: Path) -> bool:
    """True where nodes may hold states of a run (`checkpoint.partner_updates`)."""
    try:
        return config_file.of_run(run).checkpoint.partner_updates > 0
    except MpisgdError:
        return False


def tell_terminal(text: str) -> bool:
    """Say it to whoever sits at the terminal of the job's launcher, which passes nothing on any more; False where there is none."""
    with contextlib.suppress(OSError), Path("/dev/tty").open("w") as terminal:
        terminal.write(f"{text}\n")
        return True
    return False


def newest(run: Path) -> int | None:
    """The clock of the newest checkpoint with a manifest; whether each byte of it is whole, who loads it finds out."""
    for path in disk.directories(run):
        try:
            return disk.read(path).clock
        except CheckpointError:
            continue
    return None
