"""A start of ranks by this Python's MPI launcher, which can be told to save and leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.comm.signals import AGAIN_S
from mpisgd.liveness.guard import SIZE_VARIABLES

END_S = 5.0
"""Seconds for the launcher to end its ranks, before being killed."""

_TERM_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Code to get SIGTERM at the parent's death, on Linux: a killed notebook kernel leaves no ranks."""


class UnderWay:
    """A launcher and its ranks; leaving the context ends the rest.

    Launcher and ranks are a process group: Ctrl-C, at which Open MPI's launcher kills its ranks in half a second, comes to this
    process alone.

    Args:
        options: of the launcher, besides its own.
        launcher: with its words for the ranks; default: this Python's MPI.
        has_begun: whether all ranks hear signals: SIGUSR1 makes them save and leave.
        stdout: as in `subprocess.Popen`, also for standard error.

    Raises ConfigError without a launcher, or inside a rank.
    """

    def __init__(
        self,
        ranks: int,
        words: Sequence[str],
        *,
        options: Sequence[str] = (),
        launcher: Sequence[str] = (),
        has_begun: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        refuse_among_ranks()
        first, *rest = launcher or mpirun(ranks)
        command = [first, *options, *rest, *words]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TERM_WITH_PARENT, *command]
        self.process = subprocess.Popen(
            command,
            env=environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=None if stdout is None else subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._has_begun = has_begun
        self._asked_s = 0.0
        self._kill_s = float("inf")

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.end()
            self.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # leftovers of the launcher

    def stop(self) -> None:
        """Make the ranks save and leave; end them if nothing is to save, or at a repetition a second later."""
        now_s = time.monotonic()
        if not self._asked_s and self._has_begun():
            self.process.send_signal(signal.SIGUSR1)
        elif not self._asked_s or now_s - self._asked_s >= AGAIN_S:
            self.end()
        self._asked_s = self._asked_s or now_s

    def end(self) -> None:
        self.process.terminate()
        self._kill_s = min(self._kill_s, time.monotonic() + END_S)

    def wait(self) -> int:
        """Return the launcher's status; 128 + the number of a fatal signal."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(timeout=1.0)
                return status if status >= 0 else 128 - status
            if time.monotonic() > self._kill_s:
                self.process.kill()


def refuse_among_ranks() -> None:
    """Raise ConfigError if a launcher has started this process: each rank would start ranks."""
    for name in SIZE_VARIABLES:
        if os.environ.get(name, "1") not in ("", "1"):
            raise ConfigError(
                f"this process starts the ranks, but {name} = {os.environ[name]}: start a single process, without mpirun or srun"
            )
