"""Whether all ranks of this node are there while MPI starts: where one dies before or in MPI_Init, the others wait there for ever.

Without ULFM the launcher ends the job for a rank that fails, but not for one whose program ends well, without MPI; with it, the
launcher goes on without the dead, too, and MPI tells of them only when it has started. What is known before is which children the
launcher has on this node: they are its ranks. One that was there and is there no more, or that never came, is lost: no
rank leaves before MPI has started on all. Slowness is no loss: nothing here counts the seconds of a start.

MPI cannot be asked for anything then, so the launcher is told to end the job (SIGTERM); a node's daemon, which is not the launcher
itself, ends too, and with it the job, but `mpirun` then leaves with status 0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mpisgd.base.errors import EXIT_FAILED, ConfigError
from mpisgd.base.speech import last_words

LOOK_S = 0.2
STARTED_S = 2.0
"""A launcher starts the ranks of its node one right after the other: when no further one has been seen for so long, one that never
was is there no more. Where the launcher does not go on without the dead, there is no haste: `PATIENT_S`, and a child of which
nobody knows what it is may be a rank whose program a slow file system has not loaded yet."""
PATIENT_S = 10.0
FORWARD_S = 0.5
"""Seconds for the launcher to pass on the last words."""
END_S = 2.0
"""Seconds for the launcher to end the job, before a rank goes by itself."""
_LONGEST_S = 1e6
_LAUNCHER_S = 5.0
"""Seconds for a launcher to end by itself, after its ranks have left."""
_LISTENING = "00010000"
"""Flags of a socket in /proc/net/unix."""
_PARENT, _BEGAN = 1, 19
"""Places of its parent and its beginning in a process's `stat`, after its name."""


class Siblings:
    """The ranks of this node, as the launcher's children.

    Attributes:
        launcher: the process that has started them: `mpirun`, or its daemon on this node; 0 = not found, and nothing is seen.
    """

    def __init__(
        self, environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc"), pid: int = 0, started_s: float = STARTED_S
    ) -> None:
        self._proc = proc
        self._started_s = started_s
        self._job = environ.get("PMIX_NAMESPACE", "")
        self._expected = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0"))
        self._ranks: dict[int, str] = {}
        self._newest_s = math.inf
        """Second at which a rank was last seen for the first time."""
        self.launcher = self._find_launcher(pid or os.getpid()) if self._job else 0

    def _find_launcher(self, pid: int) -> int:
        """The first ancestor that is not of the job; 0 where it cannot be seen, as in a container of its own."""
        try:
            while pid > 0 and self._rank(pid) is not None:
                pid = int(self._stat(pid)[_PARENT])
        except (OSError, ValueError):
            return 0
        return pid if pid > 0 and self._children(pid) else 0

    def _stat(self, pid: int) -> list[str]:
        """Read what the system says of a process, from its third word on."""
        return (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()

    def _rank(self, pid: int) -> str | None:
        """The rank of a process; None = it is not of this job, or not yet."""
        with contextlib.suppress(OSError):
            words = dict(word.partition("=")[::2] for word in (self._proc / str(pid) / "environ").read_text().split("\0"))
            if words.get("PMIX_NAMESPACE") == self._job:
                return words.get("PMIX_RANK", "?")
        return None

    def _children(self, pid: int) -> set[int]:
        children: set[int] = set()
        for path in (self._proc / str(pid) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                children.update(map(int, path.read_text().split()))
        return children

    def lost(self, now_s: float) -> list[str]:
        """List in words who was there and is there no more, and who has never come."""
        living = self._children(self.launcher) if self.launcher else set()
        if not living:
            return []
        for pid in living - self._ranks.keys():
            rank = self._rank(pid)
            if rank is not None:
                self._ranks[pid], self._newest_s = rank, now_s
        lost = [f"rank {rank} (process {pid})" for pid, rank in sorted(self._ranks.items()) if pid not in living]
        unknown = len(living - self._ranks.keys()) if self._started_s > STARTED_S else 0
        unseen = self._expected - len(self._ranks) - unknown
        if unseen > 0 and now_s - self._newest_s > self._started_s:
            lost.append(f"{unseen} rank{'s' * (unseen > 1)}, before any other looked")
        return lost

    @property
    def launcher_of_this_job(self) -> int:
        """The launcher; 0 where it serves several jobs."""
        return self.launcher if self._job.startswith("prterun-") else 0

    def end_job(self) -> None:
        """Tell the launcher to end the job; not one that serves several jobs."""
        if self.launcher_of_this_job:
            with contextlib.suppress(OSError):
                os.kill(self.launcher, signal.SIGTERM)

    def end_launcher_within(self, seconds: float) -> subprocess.Popen[bytes] | None:
        """Kill the launcher if it is still there by then; not one that serves several jobs.

        It waits for its daemons, and for one behind a link that is down as long as TCP does.
        A process of its own, which is returned, does that: this one will be gone.
        """
        if self.launcher_of_this_job:
            with contextlib.suppress(OSError):
                began = self._stat(self.launcher)[_BEGAN]
                same = f"$(sed 's/.*)//' {self._proc}/{self.launcher}/stat | cut -d ' ' -f {_BEGAN + 2})"
                script = f'sleep {seconds}; [ "{same}" = {began} ] && kill -KILL {self.launcher}'
                null = subprocess.DEVNULL
                return subprocess.Popen(["sh", "-c", script], stdin=null, stdout=null, stderr=null, start_new_session=True)
        return None


def start_s(environ: Mapping[str, str] = os.environ) -> float:
    """In how many seconds MPI must have started; 0 = whenever. Raises ConfigError."""
    said = environ.get("MPISGD_START_S", "600")
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < _LONGEST_S:
        raise ConfigError(f"MPISGD_START_S = {said!r}: expected seconds, or 0 for never")
    return seconds


def several(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Open MPI's launcher has started several ranks, on this node or others."""
    return bool(environ.get("PMIX_NAMESPACE")) and environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"


def on_several_nodes(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Open MPI's launcher has started ranks elsewhere, too."""
    local, world = (environ.get(f"OMPI_COMM_WORLD_{what}SIZE", "") for what in ("LOCAL_", ""))
    return local != world


@contextmanager
def within(seconds: float, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """This rank leaves, with a traceback, if this is still open after so many seconds; 0 = never.

    In MPI_Init all wait for all, and no library has a deadline there: a node that cannot be reached would hang the job. This one is
    C's (faulthandler): it needs no other thread of Python: mpi4py lets none run. Where there are several nodes, the first rank
    of each has the launcher killed, too, which waits for its daemons.
    """
    if not seconds:
        yield
        return
    leads = environ.get("OMPI_COMM_WORLD_LOCAL_RANK") == "0" and on_several_nodes(environ)
    last = Siblings(environ).end_launcher_within(seconds + _LAUNCHER_S) if leads else None
    faulthandler.dump_traceback_later(seconds, file=2, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if last is not None:
            os.killpg(last.pid, signal.SIGKILL)
            last.wait()


@contextmanager
def watched(started_s: float = STARTED_S) -> Iterator[None]:
    """While this is open, all ranks of this node must live: else this one says who is lost, and ends the job.

    What is done meanwhile must let other threads run.
    """
    siblings, over = Siblings(started_s=started_s), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            lost = siblings.lost(time.monotonic())
            if lost and not over.is_set():
                _end(siblings, ", ".join(lost))

    thread = threading.Thread(target=watch, name="siblings", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end(siblings: Siblings, lost: str) -> NoReturn:
    """End the job: one rank of the node says why, and tells the launcher; the others only go, if need be."""
    name = f"mpisgd-{os.environ.get('PMIX_NAMESPACE', '')}"
    speaks = hold(name) or not is_held(name)
    if speaks:
        last_words(
            f"mpisgd: lost on {socket.gethostname()}, while MPI was starting: {lost}; the job is ended, nothing was begun: all"
            " ranks that the launcher starts are to come to mpisgd"
        )
    time.sleep(FORWARD_S)
    if speaks:
        siblings.end_job()
    time.sleep(END_S)
    os._exit(EXIT_FAILED)


def hold(name: str) -> socket.socket | None:
    """Hold a name on this machine as long as the socket, and at most the process, is there; None where another process has it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0{name}")
        holder.listen()
    except OSError:
        holder.close()
        return None
    return holder


def is_held(name: str) -> bool:
    """Ask whether a process of this user holds a name, and not one of another user of the machine."""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        try:
            asking.connect(f"\0{name}")
        except BlockingIOError:  # its queue is full: whoever knows the name can fill it
            return _listens(name)
        _, user, _ = struct.unpack("iII", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
        return bool(user == os.geteuid())
    return False


def _listens(name: str, proc: Path = Path("/proc")) -> bool:
    """Look through the open sockets of this user's processes for a listener at a name: slow, and no queue can hide it."""
    lines = (line.split(maxsplit=7) for line in (proc / "net" / "unix").read_text().splitlines())
    listening = {f"socket:[{words[6]}]" for words in lines if words[7:] == [f"@{name}"] and words[3] == _LISTENING}
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            for path in list((process / "fd").iterdir()) if process.stat().st_uid == os.geteuid() else []:
                with contextlib.suppress(OSError):
                    if str(path.readlink()) in listening:
                        return True
    return False
