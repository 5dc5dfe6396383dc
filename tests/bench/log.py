"""`python -m tests.bench log`: images/s of hardsync with the run log over without, in turn within one run.

Two runs beside each other differ by a tenth on a shared machine, and the log costs less than a hundredth. So it is kept in every
second window of a few updates, and what is compared is such a window with the mean of those before and after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.bench.parts.cases import CASES, LEARNERS, WARM_UP, Case
from mpisgd.bench.parts.measured import show, spread
from mpisgd.bench.parts.runs import run_of, scratch
from mpisgd.comm.mpi.library import MPI
from mpisgd.config import LogOptions
from mpisgd.job.roles import role
from mpisgd.records.log.writer import TableFile

WINDOW = 6
"""Updates."""
PAIRS = 24
"""Windows with the log in a run; before, between and after them are those without."""


class LogInTurn(TableFile):
    """A shard's log that is not kept while the run warms up, nor in every second window of updates from there.

    Attributes:
        windows: seconds of each window that has ended: without, with, without, ...
    """

    def __init__(self, path: Path, **fields: Any) -> None:
        super().__init__(path, **fields)
        self.windows: list[float] = []
        self._updates = 0
        self._began_s = 0.0
        self._aside, self._file = self._file, None
        self.kept = False

    def append(self, name: str, row: tuple[float, ...]) -> int:
        number = super().append(name, row)
        if name == "updates":
            self._updates += 1
            if self._updates >= WARM_UP and (self._updates - WARM_UP) % WINDOW == 0:
                self._end_window()
        return number

    def _end_window(self) -> None:
        now_s = time.perf_counter()
        if self._updates > WARM_UP:
            self.windows.append(now_s - self._began_s)
            self._aside, self._file = self._file, self._aside
            self.kept = not self.kept
        self._began_s = now_s

    def close(self, summary: tuple[float, ...] | None = None) -> None:
        self._file = self._file or self._aside
        super().close(summary)


def measure(comm: MPI.Intracomm, repetitions: int, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows are the same on every rank."""
    with scratch(comm) as directory:
        yield from (_row(comm, directory, CASES[case], repetitions) for case in cases)


def _row(comm: MPI.Intracomm, directory: Path, case: Case, repetitions: int) -> dict[str, Any]:
    images = WINDOW * LEARNERS * case.mu
    rates: dict[str, list[float]] = {"on": [], "off": []}
    ratios = []
    for _ in range(repetitions):
        off, on = split(_windows(comm, directory, case))
        rates["on"].append(float(images / np.median(on)))
        rates["off"].append(float(images / np.median(off)))
        ratios.append(float(np.median(off / on)))
    return {
        "case": case.name,
        "images_per_s": {way: spread(values) for way, values in rates.items()},
        "on_over_off": spread(ratios),
        "windows": {"updates": WINDOW, "pairs": PAIRS},
    }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [f"{row['case']}: log on / off {show(row['on_over_off'], 3)}" for row in rows]


def split(windows: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of (pairs,) windows without the log, the means of those before and after, and of those with it."""
    off = np.array(windows[::2])
    return (off[:-1] + off[1:]) / 2, np.array(windows[1::2])


def _windows(comm: MPI.Intracomm, directory: Path, case: Case) -> list[float]:
    """Measure the windows of one run."""
    logs: list[LogInTurn] = []

    def open_log(path: Path | None, *, shard: int, **fields: Any) -> TableFile:
        if shard < 0:
            return TableFile(path, shard=shard, **fields)
        log = LogInTurn(directory / "in-turn.h5", shard=shard, **fields | {"instead": True})
        logs.append(log)
        return log

    updates = WARM_UP + (2 * PAIRS + 1) * WINDOW
    with _opening_logs_by(open_log):  # and the run, which is told to keep none, asks nothing of them
        epochs = updates * LEARNERS * case.mu / case.data.samples
        run_of(comm, directory, case, log=LogOptions(enabled=False, progress="off"), epochs=epochs)
    return list(comm.bcast(logs[0].windows if logs else None, root=0))


@contextmanager
def _opening_logs_by(open_log: Callable[..., TableFile]) -> Iterator[None]:
    """A run opens its logs so, for a while."""
    known = vars(role)
    usual, known["TableFile"] = known["TableFile"], open_log
    try:
        yield
    finally:
        known["TableFile"] = usual
