"""Progress: a live bar on a terminal, plain lines in a batch log."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from mpisgd.base.terminal import say
from mpisgd.records.log.schema import EVALUATIONS

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_FIRST_S = 2.0
_MOST_EXPONENT = 700.0


def terminal() -> TextIO | None:
    """Return the stream that a person watches, if any.

    Under Open MPI every rank's standard output is a pseudo-terminal, watched or not: the output of the launcher, the parent, must
    be a terminal, too.
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


class OnUpdate(Protocol):
    def __call__(self, clock: int, epochs: float, loss: float, now_s: float) -> None:
        """Note an update."""

    def close(self) -> None:
        """Note the end."""


class Progress:
    """Progress of shard 0: epoch, loss, updates/s, mean staleness, time left; `every_s`: between plain lines."""

    def __init__(self, mode: Literal["auto", "bar", "plain", "off"], total_epochs: float, every_s: float) -> None:
        self.on_update: OnUpdate | None = None
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
        self._told_s, self._told_clock = now_s, clock

    def staleness(self, staleness: int) -> None:
        self._staleness += staleness
        self._pushes += 1

    def update(self, clock: int, epochs: float, loss: float, now_s: float) -> None:
        if self.on_update is not None:
            self.on_update(clock, epochs, loss, now_s)
        elapsed_s = now_s - self._told_s
        if self._mode == "off" or (elapsed_s < self._every_s and epochs < self._total):
            return
        rate = (clock - self._told_clock) / elapsed_s if elapsed_s > 0 else 0.0
        mean = self._staleness / self._pushes if self._pushes else 0.0
        text = f"loss {loss:.4f}, {rate:.1f} updates/s, mean staleness {mean:.2f}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(epochs, self._total), text=text, refresh=True)
            if epochs >= self._total:
                self._end_bar()  # lines on evaluations come below the bar
                self._mode = "off"
        else:
            left_s = now_s * (self._total - epochs) / epochs if epochs > 0 else 0.0
            left = "trained; evaluations follow" if epochs >= self._total else f"{max(0.0, left_s):.0f} s left"
            say(f"epoch {min(epochs, self._total):.2f}/{self._total:g}: {text}, {left}")
        self._told_s, self._told_clock, self._staleness, self._pushes = now_s, clock, 0, 0

    def close(self) -> None:
        self._end_bar()
        on_update, self.on_update = self.on_update, None
        if on_update is not None:
            on_update.close()

    def _end_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def _bar(total: float, stream: TextIO) -> Bar:
    """Return a bar drawn only on request: no thread beside the shard's loop."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    numbers = TextColumn("{task.completed:.2f}/{task.total:g} epochs")
    columns = (BarColumn(12), numbers, TimeRemainingColumn(compact=True), TextColumn("{task.fields[text]}"))
    bar = Bar(*columns, console=Console(file=stream, force_terminal=True), auto_refresh=False)
    bar.add_task("training", total=total, text="")
    bar.start()
    return bar


def loss_of(config: Mapping[str, Any]) -> str:
    """Return the loss named in a run's config.toml; "" with an own step."""
    return "" if config.get("step") else str(config.get("loss", ""))


def in_words(row: Any, loss: str, metrics: Sequence[str]) -> str:
    """Return an evaluation in words: `error 2.50 %`, `loss 3.2, perplexity 24.5`, `loss 0.1, accuracy 0.93`.

    `loss`: "" with an own step. Cross entropy without a share of wrong classes, as of a language model, adds perplexity.
    """
    error, value = float(row["error"]), float(row["loss"])
    if math.isfinite(error):
        words = [f"error {100 * error:.2f} %"]
    else:
        words = [f"loss {value:.4g}"]
        if loss == "cross_entropy" and value < _MOST_EXPONENT:
            words.append(f"perplexity {math.exp(value):.4g}")
    return ", ".join([*words, *(f"{name} {float(row[name]):.4g}" for name in metrics)])


class Evaluations:
    """Progress of evaluations in plain lines, on the evaluating rank.

    Args:
        snapshots: number expected, with the last weights.
        every_s: between lines; the first comes sooner: training has ended.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "plain", "off"],
        snapshots: int,
        batches: int,
        every_s: float,
        loss: str = "",
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on = mode != "off"
        self._snapshots = snapshots
        self._batches = batches
        self._every_s = every_s
        self._now_s = now_s
        self._next_s = now_s() + min(every_s, _FIRST_S)
        self._number = 0
        self._batch = 0
        self._loss = loss
        self._found = ""

    def found(self, row: Mapping[str, float]) -> None:
        """Add a snapshot's row, on test data, to the next line."""
        if not math.isnan(row["loss"]):
            metrics = [name for name in row if name not in (EVALUATIONS.names or ())]
            self._found = f"; the snapshot before: test {in_words(row, self._loss, metrics)}"

    def say(self, text: str) -> None:
        if self._on:
            say(text)

    def begin(self, number: int) -> None:
        self._number, self._batch = number, 0

    def batch(self) -> None:
        self._batch += 1
        now_s = self._now_s()
        if self._on and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            number, of = self._number + 1, max(self._snapshots, self._number + 1)
            text = f"evaluating snapshot {number} of {of}, batch {self._batch} of {self._batches}{self._found}"
            say(text)
