"""A job of `mpisgd train`: told of signals, and begun again after failures."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from mpisgd.comm.mpi.launch import STARTED_BY
from mpisgd.comm.signals import HEARD, name_of
from mpisgd.config import config_file
from mpisgd.config.trust import resume_line
from mpisgd.job.interruption import keeps_near, newest
from mpisgd.launching.under_way import UnderWay
from mpisgd.records.log import schema


@dataclass(frozen=True)
class Job:
    """A job to start.

    Args:
        options: of the launcher.
        launcher: with its words for the ranks; default: this Python's MPI.
        started_by: words of the command before those of `mpisgd train`.
    """

    ranks: int
    words: Sequence[str]
    path: Path
    resumed: bool
    options: Sequence[str] = ()
    launcher: Sequence[str] = ()
    started_by: str = ""


class Attempts:
    """Starts of the job, up to `restarts` more after failure or foreign interruption; none after a refusal or a stop."""

    def __init__(self, job: Job, restarts: int) -> None:
        self._job = job
        self._restarts = restarts
        self._before = self._stamp()
        self._ours = False
        """The run is this job's, no older run."""
        self._under_way: UnderWay | None = None
        self._asked_nodes = False
        """The last start asked nodes for states: the directory had no checkpoint."""
        self._told = 0

    def run(self) -> int:
        """Return the job's status: 0 if, and only if, its run is DONE."""
        words, made = self._job.words, 0
        with self._hearing():
            while True:
                status = self._start(words)
                refused = status == EXIT_USAGE and not self._asked_nodes
                if status == EXIT_OK or refused or self._told or made == self._restarts:
                    return status
                made += 1
                words, how = self._again()
                print(
                    f"mpisgd run: the job has ended with status {status}: {how}, restart {made} of {self._restarts}",
                    file=sys.stderr,
                    flush=True,
                )

    def _start(self, words: Sequence[str]) -> int:
        if self._told:
            return 128 + self._told
        self._before = self._stamp()
        train = [sys.executable, "-P", "-m", "mpisgd", "train", *words]
        job = self._job
        env = {STARTED_BY: job.started_by} if job.started_by else {}
        with UnderWay(
            job.ranks, train, options=job.options, launcher=job.launcher, has_begun=self._has_begun, env=env
        ) as self._under_way:
            if self._told:  # meanwhile
                self._under_way.stop()
            status = self._under_way.wait()
        self._under_way = None
        begun = self._has_begun()
        self._ours |= begun
        if (self._job.path / schema.DONE).is_file() and (self._ours or self._job.resumed):
            return EXIT_OK
        if self._told and not begun:
            print(f"mpisgd run: stopped by {name_of(self._told)} before the ranks had begun", file=sys.stderr)
            return 128 + self._told
        if status == EXIT_OK:
            print(f"mpisgd run: the launcher says 0, but {self._job.path} is not DONE: see the messages above", file=sys.stderr)
            return EXIT_FAILED
        return status

    def _again(self) -> tuple[Sequence[str], str]:
        path = self._job.path
        if not (self._ours or self._job.resumed):
            return self._job.words, "the run had not begun, and is started anew"
        clock, asked, self._asked_nodes = newest(path), self._asked_nodes, False
        if clock is None and (asked or not keeps_near(path)):
            return [*self._job.words, "--overwrite"], "the run has no checkpoint, and begins anew"
        self._asked_nodes = clock is None
        how = "the newest state on the nodes" if clock is None else f"the checkpoint of clock {clock:,}"
        return shlex.split(resume_line(path, config_file.of_run(path)))[2:], f"the run goes on from {how}"

    def _stamp(self) -> tuple[int, int]:
        """Identify config.toml: each attempt writes its own, once all ranks hear signals."""
        try:
            there = (self._job.path / schema.CONFIG).stat()
        except OSError:
            return 0, 0
        return there.st_ino, there.st_mtime_ns

    def _has_begun(self) -> bool:
        return self._stamp() not in (self._before, (0, 0))

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Let signals to this process make the job save and leave."""
        heard = (*HEARD, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = self._told or number
        if self._under_way is not None:
            self._under_way.stop()
