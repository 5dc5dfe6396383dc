"""Progress: a live bar on a terminal, a plain line now and then in a batch log."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


def terminal() -> TextIO | None:
    """The stream by which a person watches, if one does.

    Under Open MPI every rank's standard output is a pseudo-terminal of the launcher, whether or not somebody watches the
    launcher; so the launcher's own output, the parent's, must be a terminal as well.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    if sys.stderr.isatty():
        return sys.stderr
    try:
        watched = Path(f"/proc/{os.getppid()}/fd/1").readlink().match("/dev/pts/*")
    except OSError:
        watched = False
    return sys.stdout if watched and sys.stdout.isatty() else None


class Progress:
    """Told of each push and update by shard 0; prints epoch, loss, updates/s, mean staleness, time left.

    Args:
        mode: as in `LogOptions.progress`.
        total_epochs: length of the run.
        every_s: seconds between plain lines.
    """

    def __init__(self, mode: Literal["auto", "bar", "plain", "off"], total_epochs: float, every_s: float) -> None:
        stream = terminal()
        if mode == "auto":
            mode = "bar" if stream is not None else "plain"
        self._mode = mode
        self.on = mode != "off"
        self._total = total_epochs
        self._every_s = 0.2 if mode == "bar" else every_s
        self._bar = _bar(total_epochs, stream or sys.stderr) if mode == "bar" else None
        self._told_s = 0.0
        self._told_clock = 0
        self._staleness = 0
        self._pushes = 0

    def resume(self, clock: int, now_s: float) -> None:
        """The run goes on from here: rates count from now."""
        self._told_s, self._told_clock = now_s, clock

    def staleness(self, staleness: int) -> None:
        self._staleness += staleness
        self._pushes += 1

    def update(self, clock: int, epochs: float, loss: float, now_s: float) -> None:
        elapsed_s = now_s - self._told_s
        if self._mode == "off" or (elapsed_s < self._every_s and epochs < self._total):
            return
        rate = (clock - self._told_clock) / elapsed_s if elapsed_s > 0 else 0.0
        mean = self._staleness / self._pushes if self._pushes else 0.0
        text = f"loss {loss:.4f}, {rate:.1f} updates/s, mean staleness {mean:.2f}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(epochs, self._total), text=text, refresh=True)
        else:
            left_s = now_s * (self._total - epochs) / epochs if epochs > 0 else 0.0
            done = min(epochs, self._total)
            print(f"epoch {done:.2f}/{self._total:g}: {text}, {max(0.0, left_s):.0f} s left", file=sys.stderr, flush=True)
        self._told_s, self._told_clock, self._staleness, self._pushes = now_s, clock, 0, 0

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(total: float, stream: TextIO) -> Bar:
    """A bar that is drawn only when it is told to: no thread beside the shard's loop."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    numbers = TextColumn("{task.completed:.2f}/{task.total:g} epochs")
    columns = (BarColumn(12), numbers, TimeRemainingColumn(compact=True), TextColumn("{task.fields[text]}"))
    bar = Bar(*columns, console=Console(file=stream, force_terminal=True), auto_refresh=False)
    bar.add_task("training", total=total, text="")
    bar.start()
    return bar
