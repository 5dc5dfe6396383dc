"""A reaper, a process of each node outside MPI, ends a fault-tolerant or multi-node job there: hanging ranks cannot leave.

Once the job is over, ranks have `GRACE_S`. Ranks that leave in order tell the reaper, by a socket in a directory of this user with
a secret name, drawn by rank 0.

The job is over when RUNNING is gone from the run's directory, removed by rank 0 or its node's reaper. Behind a dead link mpirun and
its daemon wait as long as TCP: after a rank given up, lost or killed, the reaper ends the launcher's connections to other nodes,
`LAUNCHER_S` after the last rank; the launcher leaves with its ranks' status. In vain, the reaper kills the launcher; at once if
rank 0 left without order. In an orderly end, rank 0 has its launcher seen out, `LEAVE_S` after itself.

A node's ranks must see the same /tmp, all nodes the run's directory. If rank 0's node loses power, RUNNING stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

GRACE_S = 5.0
"""Seconds to leave after the job; mostly less than a second suffices."""
LAUNCHER_S = 8.0
"""More than other nodes' reapers take."""
LEAVE_S = 20.0
"""Seconds for mpirun to hear of orderly leaves."""
FORCE_S = 5.0
"""Seconds for mpirun to leave before a kill."""
LOOK_S = 0.5
_ASKED_PER_S = 100
"""Most looks for RUNNING per second, by all reapers: one file system serves all."""
_MOST_S = 30.0

_SEE_OUT, _DOOR = "see-out", "door"
_JOB = "REAPED_JOB"
"""Variable with the job's name, which a command line would show to all users."""
_SPEAK_S = 1.0
_LONGEST = 256
_PIDFD_GETFD = 438
"""Number of the system call, on all machines."""
_OF_RANKS = ("OMPI_", "PMIX_", "PRTE_")


def name() -> str:
    """Draw a job's unique name, secret until use."""
    return secrets.token_hex(16)


def announce(running: Path, job: str) -> None:
    """Announce, as rank 0, before reapers look."""
    running.write_text(job)


def retract(running: Path, job: str) -> None:
    if _is_of(running, job):
        running.unlink(missing_ok=True)


def _is_of(running: Path, job: str) -> bool:
    """Return whether the job runs; True if a file system fails, or the directory was removed."""
    try:
        return running.read_text() == job
    except FileNotFoundError:
        return not running.parent.is_dir()
    except OSError:
        return True


def call(running: Path, job: str, pids: Sequence[int], first: int = 0, launcher: int = 0, *, node: int = 0, nodes: int = 1) -> None:
    """Start this node's reaper, by a rank; afterwards ranks can say that they leave. Raises OSError: no socket.

    Args:
        first: pid of rank 0, if here.
        launcher: pid of mpirun, or its daemon here, if of no other job; 0 = unknown.
        node: number of this node; several hosts may be containers of a machine.
    """
    with open_door(job, node) as door:
        words = [str(door.fileno()), str(running), str(first), str(launcher), str(nodes), *map(str, pids)]
        _start(words, [door.fileno()], {_JOB: job})


def open_door(job: str, node: int = 0) -> socket.socket:
    """Make the socket at which ranks say that they leave, for this user only. Raises OSError."""
    place = _place(job, node)
    place.mkdir(0o700)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        door.bind(str(place / _DOOR))
    except OSError:
        door.close()
        place.rmdir()
        raise
    return door


def see_out(launcher: int) -> None:
    """Have mpirun end `LEAVE_S` after this process; by rank 0, in an orderly end."""
    _start([_SEE_OUT, str(os.getpid()), str(launcher)])


def _start(words: Sequence[str], doors: Sequence[int] = (), more: Mapping[str, str] = MappingProxyType({})) -> None:
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the launcher waits while anybody has its pipes
        env={name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)} | dict(more),
        cwd="/",
        pass_fds=doors,
        start_new_session=True,  # the launcher kills the groups of its ranks
    )


def leave(job: str, *, given_up: bool = False, node: int = 0) -> None:
    """Say that this rank leaves in order. `given_up`: another node's ranks may hang."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker, contextlib.suppress(OSError):
        speaker.settimeout(_SPEAK_S)
        speaker.sendto(f"{job} {os.getpid()} {given_up:d}".encode(), str(_place(job, node) / _DOOR))


def _place(job: str, node: int = 0) -> Path:
    # On each machine its own, and short enough for a socket's address.
    return Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()) / f"mpisgd-{job}-{node}"


class Process:
    """A process, told from later ones with its number."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._stat = proc / str(pid) / "stat"
        self._began = self._look()

    def _look(self) -> str:
        try:
            state, *rest = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state in "ZX" else rest[18]

    @property
    def lives(self) -> bool:
        return self._began != "" and self._look() == self._began

    def lives_on(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while self.lives and time.monotonic() < until_s:
            time.sleep(0.1)
        return self.lives

    def send(self, signum: int) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Reaper:
    """A node's reaper; arguments as of `call`, None = not on this node.

    Attributes:
        ignored: messages from outside the job.
    """

    def __init__(
        self,
        door: socket.socket,
        running: Path,
        job: str,
        ranks: Sequence[Process],
        first: Process | None = None,
        launcher: Process | None = None,
        nodes: int = 1,
    ) -> None:
        self.ignored = 0
        self._door = door
        self._running = running
        self._job = job
        self._ranks = list(ranks)
        self._inside = {rank.pid: rank for rank in ranks}
        self._first = first
        self._launcher = launcher
        self._pause_s = min(_MOST_S, max(LOOK_S, nodes / _ASKED_PER_S))
        self._next_s = time.monotonic() + random.uniform(0, self._pause_s)
        self._stranded = False
        """A launcher may wait for ranks it cannot hear of."""
        self._failed = False

    def attend(self) -> None:
        """Wait until this node's ranks have left, or make them."""
        while self._hear(LOOK_S) and not self._rank_0_is_gone() and not self._is_over():
            pass
        if self._rank_0_is_gone():
            self._stranded = self._failed = True
            retract(self._running, self._job)
        until_s = time.monotonic() + GRACE_S
        while self._hear(0.05) and time.monotonic() < until_s:
            pass
        for rank in (rank for rank in self._inside.values() if rank.lives):
            rank.send(signal.SIGKILL)
            self._stranded = True
        if self._launcher is not None and self._stranded:
            end(self._launcher, self._ranks, LAUNCHER_S + self._pause_s, in_order=not self._failed)

    def _is_over(self) -> bool:
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + self._pause_s
        return not _is_of(self._running, self._job)

    def _rank_0_is_gone(self) -> bool:
        """Return whether rank 0 left this node without order."""
        first = self._first  # in order it removes RUNNING first; its message may not be heard yet, or find the queue full
        return first is not None and first.pid in self._inside and not first.lives and _is_of(self._running, self._job)

    def _hear(self, within_s: float) -> bool:
        """Note leaving ranks; return whether any is inside."""
        self._door.settimeout(within_s)
        try:
            job, pid, given_up = self._door.recv(_LONGEST).decode().split()
            if job != self._job:
                raise ValueError(job)
            self._inside.pop(int(pid), None)
            self._stranded |= given_up == "1"
        except TimeoutError:
            pass
        except ValueError:
            self.ignored += 1
        return any(rank.lives for rank in self._inside.values())


def end(launcher: Process, ranks: Sequence[Process], within_s: float, *, in_order: bool = True) -> None:
    """End a launcher still there `within_s` after these ranks.

    A failed job's launcher is killed, for its status: without daemons it leaves with 0.
    """
    while any(rank.lives for rank in ranks):
        time.sleep(LOOK_S)
    if launcher.lives_on(within_s):
        if in_order:
            hang_up(launcher.pid)
        if not in_order or launcher.lives_on(FORCE_S):
            launcher.send(signal.SIGKILL)


def hang_up(pid: int) -> None:
    """End a process's connections to other machines."""
    with contextlib.suppress(OSError):  # ended, or not ours
        process = os.pidfd_open(pid)
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, int(path.name), 0)
                if copy >= 0 and str(path.readlink()).startswith("socket:"):
                    _end_connection(socket.socket(fileno=copy))
                elif copy >= 0:
                    os.close(copy)


def _end_connection(end: socket.socket) -> None:
    with end:
        if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[0] != end.getsockname()[0]:
            end.shutdown(socket.SHUT_RDWR)


def main(words: Sequence[str]) -> None:
    if words[0] == _SEE_OUT:
        rank, launcher = map(int, words[1:])
        end(Process(launcher), [Process(rank)], LEAVE_S)
    else:
        attend(words)


def attend(words: Sequence[str]) -> None:
    door, running, first, launcher, nodes, *pids = words
    ranks = [Process(int(pid)) for pid in pids]
    named = {rank.pid: rank for rank in ranks}
    begun = Process(int(launcher)) if int(launcher) else None
    with socket.socket(fileno=int(door)) as opened:
        Reaper(opened, Path(running), os.environ[_JOB], ranks, named.get(int(first)), begun, int(nodes)).attend()
        close_door(opened)


def close_door(door: socket.socket) -> None:
    path = Path(door.getsockname())
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
