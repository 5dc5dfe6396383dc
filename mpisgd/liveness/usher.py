"""Sees to it that the end of a fault-tolerant job, or of one on several nodes, comes to every node: who hangs cannot leave.

A learner that was given up is still a process: stopped, or waiting for a network that carries nothing. Where it is on the node of
the others they kill it at the end; on another node its launcher waits for it for ever, and the job with it. So one small process of
each node, its usher, which is none of MPI's, looks now and then whether the job is over, and gives who is left `GRACE_S` to leave.
A rank that has come to the end in order says so, and is no longer its business. It says so by a socket in a directory of the job's
user alone, whose name nobody can know before: rank 0 draws the job's name, and MPI hands it round.

The job is over when the file RUNNING is gone from the run's directory: rank 0 removes it at the end, and, however rank 0 ends, the
usher of its node. Where mpirun hears no more of another node, since a link is down, it waits for that one's ranks for as long as
TCP is patient, a quarter of an hour or more; so does its daemon there. So where a rank was given up, is lost or had to be killed,
the usher ends the launcher's connections to other nodes, `LAUNCHER_S` after the last rank here: to it those are lost then, and it
leaves with the status that its ranks gave it. That is allowed to who may debug it; where it is refused, or no help, it is killed;
so it is, at once, where rank 0 has left without order: a launcher that has lost daemons may say 0.
A link that goes down just as all ranks leave in order strands a launcher, too, in any job on several nodes: where nothing but the
job was to be done, rank 0 has it seen out, `LEAVE_S` after itself.

Limits: the ranks of a node see the same /tmp. The directory lies on a file system that all nodes see. Where a node's network is
down and the file system with it, its usher waits until that is back. Where rank 0's node loses its power, nobody removes the file.
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
"""Seconds to leave in, when the job is over; ranks that do not hang mostly need less than one."""
LAUNCHER_S = 8.0
"""More than the other nodes' ushers take."""
LEAVE_S = 20.0
"""Seconds for mpirun to hear of ranks that have left in order, on all nodes."""
FORCE_S = 5.0
"""Seconds for mpirun to leave, before it is killed."""
LOOK_S = 0.5
_ASKED_PER_S = 100
"""How often the file RUNNING is asked for in a second, at most, by the ushers of all nodes: its file system serves all of them."""
_MOST_S = 30.0

_SEE_OUT, _DOOR = "see-out", "door"
_JOB = "USHERED_JOB"
"""The variable that tells an usher the job's name, which a command line would show to all users."""
_SPEAK_S = 1.0
_LONGEST = 256
"""Bytes of a message."""
_PIDFD_GETFD = 438
"""The number of the system call, on all machines."""
_OF_RANKS = ("OMPI_", "PMIX_", "PRTE_")
"""Variables that tell a process that it is a rank."""


def name() -> str:
    """Draw a name that only this job has, and that only its ranks know before it is used."""
    return secrets.token_hex(16)


def announce(running: Path, job: str) -> None:
    """By rank 0, before any usher looks: this job runs."""
    running.write_text(job)


def retract(running: Path, job: str) -> None:
    """This job is over; a file of another one is left."""
    if _is_of(running, job):
        running.unlink(missing_ok=True)


def _is_of(running: Path, job: str) -> bool:
    """Whether that job runs; where a file system fails, or somebody has removed the directory, it does for all that is known."""
    try:
        return running.read_text() == job
    except FileNotFoundError:
        return not running.parent.is_dir()
    except OSError:
        return True


def call(running: Path, job: str, pids: Sequence[int], first: int = 0, launcher: int = 0, *, node: int = 0, nodes: int = 1) -> None:
    """Start this node's usher, by one of its ranks; when this returns, ranks can say that they leave.

    Args:
        running: the file that says that the job runs.
        job: a name of the job, which that file holds; no other job has it.
        pids: the ranks of this node.
        first: that of rank 0, where it is one of them.
        launcher: that of mpirun, or its daemon on this node, where it serves no other job; 0 = not known.
        node: its number; hosts of several names may be containers of one machine, with one network.
        nodes: how many there are.

    Raises OSError where no socket can be made.
    """
    with open_door(job, node) as door:
        words = [str(door.fileno()), str(running), str(first), str(launcher), str(nodes), *map(str, pids)]
        _start(words, [door.fileno()], {_JOB: job})


def open_door(job: str, node: int = 0) -> socket.socket:
    """Make the socket by which ranks of this node say that they leave; nobody but this user can reach it. Raises OSError."""
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
    """Have mpirun end `LEAVE_S` after this process, if it has not left by then; by rank 0, when all ranks leave in order."""
    _start([_SEE_OUT, str(os.getpid()), str(launcher)])


def _start(words: Sequence[str], doors: Sequence[int] = (), more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start this file as a process that holds nothing of a rank's."""
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the launcher waits until nobody has its pipes any more
        env={name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)} | dict(more),
        cwd="/",
        pass_fds=doors,
        start_new_session=True,  # the launcher kills the groups of its ranks
    )


def leave(job: str, *, given_up: bool = False, node: int = 0) -> None:
    """Say that this rank has come to the end of the job in order. `given_up`: another node has ranks of which nothing is known."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker, contextlib.suppress(OSError):
        speaker.settimeout(_SPEAK_S)
        speaker.sendto(f"{job} {os.getpid()} {given_up:d}".encode(), str(_place(job, node) / _DOOR))


def _place(job: str, node: int = 0) -> Path:
    """The directory of a node's socket: on each machine its own, with a path short enough for a socket's address."""
    return Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()) / f"mpisgd-{job}-{node}"


class Process:
    """A process of this machine; one that has got its number later is another one."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._stat = proc / str(pid) / "stat"
        self._began = self._look()

    def _look(self) -> str:
        """When it began; "" = it is gone."""
        try:
            state, *rest = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state in "ZX" else rest[18]

    @property
    def lives(self) -> bool:
        return self._began != "" and self._look() == self._began

    def lives_on(self, within_s: float) -> bool:
        """Whether it is still there then; False as soon as it is not."""
        until_s = time.monotonic() + within_s
        while self.lives and time.monotonic() < until_s:
            time.sleep(0.1)
        return self.lives

    def send(self, signum: int) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Usher:
    """One node's.

    Args:
        door: where ranks say that they leave.
        running, job, first, launcher, nodes: as of `call`; None = not on this node.

    Attributes:
        ignored: messages that no rank of the job has sent.
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
        """Whether a launcher may wait for ranks that it cannot hear of."""
        self._failed = False

    def attend(self) -> None:
        """Until all ranks of this node have left, or have been made to."""
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
        """Ask now and then whether RUNNING is gone."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + self._pause_s
        return not _is_of(self._running, self._job)

    def _rank_0_is_gone(self) -> bool:
        """Whether it was on this node, and has left without order."""
        return self._first is not None and self._first.pid in self._inside and not self._first.lives

    def _hear(self, within_s: float) -> bool:
        """Take note of who leaves; whether anybody is still inside."""
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
    """End a launcher that does not leave so many seconds after the last of these ranks; that of a job that failed with a status
    that says so: one that has lost its daemons leaves with 0."""
    while any(rank.lives for rank in ranks):
        time.sleep(LOOK_S)
    if launcher.lives_on(within_s):
        if in_order:
            hang_up(launcher.pid)
        if not in_order or launcher.lives_on(FORCE_S):
            launcher.send(signal.SIGKILL)


def hang_up(pid: int) -> None:
    """End a process's connections to other machines, as seen from both ends."""
    with contextlib.suppress(OSError):  # it has ended, or is not ours
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
        Usher(opened, Path(running), os.environ[_JOB], ranks, named.get(int(first)), begun, int(nodes)).attend()
        close_door(opened)


def close_door(door: socket.socket) -> None:
    """Remove the socket, and its directory."""
    path = Path(door.getsockname())
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
