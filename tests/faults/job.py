"""A run of real ranks that something is done to: its lines with the second at which each came, and the process of each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpisgd.comm.mpi.launch import environment, mpirun

_RANKS = ("OMPI_COMM_WORLD_RANK=", "PMI_RANK=")
ULFM = ["--with-ft", "ulfm"]
"""Open MPI's launcher then tells of failures: for fault-tolerant jobs."""
HERE = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
"""The PYTHONPATH of ranks that run a module of the tests."""
GONE_S = 40.0
"""After the launcher has ended, or was to end, all processes must be gone."""


_UNDER_WAY: list[Job] = []


def stop_orderly() -> None:
    """From now on the first SIGINT or SIGTERM ends this process by SystemExit; no other disturbs what it then does, `end_all`."""

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def end_all() -> None:
    """Kill what is left of jobs whose end nobody has waited for: the campaign was stopped, or did not come so far."""
    for job in list(_UNDER_WAY):
        job.end(0)


class Job:
    """`mpirun [options] -n ranks mpisgd train words...`, under way; or, in the place of mpisgd, a `module` that is it but for.

    `inside`: what, put before the launcher, has it run elsewhere.
    """

    def __init__(
        self,
        ranks: int,
        words: Sequence[str],
        options: Sequence[str] = (),
        module: str = "mpisgd",
        inside: Sequence[str] = (),
        **env: str,
    ) -> None:
        launcher, *rest = mpirun(ranks)
        command = [*inside, launcher, *options, *rest, sys.executable, "-m", module, "train", *words]
        self.ranks = ranks
        self.lines: list[tuple[float, str]] = []
        self._new = threading.Condition()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment() | env,
            start_new_session=True,
        )
        _UNDER_WAY.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._pids: dict[int, int] = {}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._new:
                self.lines.append((time.monotonic(), line.rstrip()))
                self._new.notify_all()
        with self._new:
            self._new.notify_all()

    def wait_for(self, text: str, timeout_s: float = 240.0, after_s: float = 0.0) -> float:
        """The second at which a line with this text came, after another second. Raises TimeoutError."""

        def found() -> float | None:
            return next((at for at, line in self.lines if text in line and at >= after_s), None)

        with self._new:
            if self._new.wait_for(lambda: found() is not None or not self._reader.is_alive(), timeout_s):
                at = found()
                if at is not None:
                    return at
        raise TimeoutError(f"no line with {text!r}:\n{self.text}")

    def until(self, condition: Callable[[], object], timeout_s: float = 240.0) -> None:
        """Wait until a condition holds. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(self.text)
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def over(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that was ever seen."""
        if len(self._pids) < self.ranks:
            for path in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):
                    words = path.read_text(errors="replace").split("\0")
                    rank = next((word.partition("=")[2] for word in words if word.startswith(_RANKS)), "")
                    if rank and self._is_rank(int(path.parent.name)):
                        self._pids[int(rank)] = int(path.parent.name)
        return self._pids

    def _is_rank(self, pid: int) -> bool:
        """Whether a process with a rank's environment is that rank itself, in this job."""
        of = parent(pid)
        return self._process.pid in (of, parent(of))  # MPICH's launcher has a daemon here, too

    def send(self, rank: int, signum: int) -> float:
        """Send a signal to a rank; the second at which that was."""
        at = time.monotonic()
        os.kill(self.pids[rank], signum)
        return at

    def send_launcher(self, signum: int) -> None:
        """The same to the launcher."""
        self._process.send_signal(signum)

    def end(self, timeout_s: float) -> int | None:
        """The launcher's exit status; None where it had to be killed."""
        try:
            status: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        else:
            self._reader.join(5)
        self.left_s = self._see_them_gone(GONE_S if status is not None else 0.0)
        if self in _UNDER_WAY:
            _UNDER_WAY.remove(self)
        return status

    def _see_them_gone(self, within_s: float) -> float | None:
        """Seconds until no process of the job was there; None where some had to be killed."""
        begun_s = time.monotonic()
        pids = [*self.pids.values(), self._process.pid]
        while any(_alive(pid) for pid in pids):
            if time.monotonic() - begun_s > within_s:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.wait()
                while any(_alive(pid) for pid in pids) and time.monotonic() - begun_s < within_s + GONE_S:
                    time.sleep(0.01)  # one that writes dies when it has written
                return None
            time.sleep(0.01)
        return time.monotonic() - begun_s


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
