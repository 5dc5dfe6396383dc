"""A watch over this node's ranks while MPI starts: if a rank dies before or in MPI_Init, the others wait there for ever.

Without ULFM the launcher ends the job for a failing rank, but not for a program that ends well without MPI. With ULFM it goes on
without the dead, which MPI reports only after its start. The launcher's children on this node are its ranks. A vanished or missing
child is lost: no rank leaves before MPI has started on all.

The launcher is told to end the job (SIGTERM). If it is a node's daemon, the job ends, but `mpirun` leaves with status 0.
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
from typing import IO, NoReturn

from mpisgd.base.errors import EXIT_FAILED, ConfigError
from mpisgd.base.terminal import last_words

LOOK_S = 0.2
STARTED_S = 2.0
"""Seconds without a new rank until a missing one is lost: launchers start ranks in quick succession.

Without ULFM `PATIENT_S`: an unknown child may be a rank that a slow file system still loads.
"""
PATIENT_S = 10.0
FORWARD_S = 0.5
"""Seconds for the launcher to pass on last words."""
END_S = 2.0
"""Seconds for the launcher to end the job, before a rank leaves by itself."""
_LONGEST_S = 1e6
_LAUNCHER_S = 5.0
"""Seconds for a launcher to end after its ranks."""
_LISTENING = "00010000"
_PARENT, _BEGAN = 1, 19
"""Indices in a process's `stat`, from its third word on."""


class NodeProcesses:
    """Ranks of this node.

    Attributes:
        launcher: `mpirun`, or its daemon on this node; 0 = not found, nothing is watched.
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
        self.launcher = self._find_launcher(pid or os.getpid()) if self._job else 0

    def _find_launcher(self, pid: int) -> int:
        """Return the first ancestor outside the job; 0 if invisible, as in a container."""
        try:
            while pid > 0 and self._rank(pid) is not None:
                pid = int(self._stat(pid)[_PARENT])
        except (OSError, ValueError):
            return 0
        return pid if pid > 0 and self._children(pid) else 0

    def _stat(self, pid: int) -> list[str]:
        return (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()

    def _rank(self, pid: int) -> str | None:
        """Return a process's rank; None = not of this job, or not yet."""
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
        """The launcher; 0 if it serves several jobs."""
        return self.launcher if self._job.startswith("prterun-") else 0

    def end_job(self) -> None:
        if self.launcher_of_this_job:
            with contextlib.suppress(OSError):
                os.kill(self.launcher, signal.SIGTERM)

    def end_launcher_within(self, seconds: float) -> subprocess.Popen[bytes] | None:
        """Kill the launcher if still there by then: it waits for daemons as long as TCP."""
        return self.end_launcher_after(f"sleep {seconds}")

    def end_launcher_after(
        self, script: str, stdin: int = subprocess.DEVNULL, output: int | None = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes] | None:
        """Run a shell script, then kill the launcher if still there, which `there` tells."""
        if self.launcher_of_this_job:
            with contextlib.suppress(OSError):
                began = self._stat(self.launcher)[_BEGAN]
                same = f"$(sed 's/.*)//' {self._proc}/{self.launcher}/stat | cut -d ' ' -f {_BEGAN + 2})"
                script = f'there() {{ [ "{same}" = {began} ]; }}; {script}; there && kill -KILL {self.launcher}'
                env = {"PATH": os.environ.get("PATH", os.defpath)}  # without a rank's variables: the shell is none
                words = ["sh", "-c", script]
                return subprocess.Popen(words, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=env)
        return None


def start_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return seconds to wait for ranks; 0 = no limit. Raises ConfigError."""
    said = environ.get("MPISGD_START_S", "600")
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < _LONGEST_S:
        raise ConfigError(f"MPISGD_START_S = {said!r}: expected seconds, or 0 for never")
    return seconds


def unless_dumping(seconds: float) -> float:
    """Return 0 if stacks are dumped: `within` has the same timer."""
    return 0.0 if float(os.environ.get("MPISGD_HANG_S", "0")) > 0 else seconds


def several(environ: Mapping[str, str] = os.environ) -> bool:
    return bool(environ.get("PMIX_NAMESPACE")) and environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"


def on_several_nodes(environ: Mapping[str, str] = os.environ) -> bool:
    local, world = (environ.get(f"OMPI_COMM_WORLD_{what}SIZE", "") for what in ("LOCAL_", ""))
    return local != world


@contextmanager
def within(seconds: float, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Leave with a traceback if still open after `seconds`; 0 = never.

    MPI_Init has no deadline. The timer is C's (faulthandler): mpi4py lets no Python thread run.
    """
    if not seconds:
        yield
        return
    # The first rank of each node also has the launcher killed, which would wait for the daemons of other nodes.
    leads = environ.get("OMPI_COMM_WORLD_LOCAL_RANK") == "0" and on_several_nodes(environ)
    last = NodeProcesses(environ).end_launcher_within(seconds + _LAUNCHER_S) if leads else None
    faulthandler.dump_traceback_later(seconds, file=2, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if last is not None:
            os.killpg(last.pid, signal.SIGKILL)
            last.wait()


def leave_within(seconds: float) -> None:
    """End this process by then, with EXIT_FAILED, whatever hangs: MPI, Python's global lock, standard error."""
    try:
        told: IO[str] | int = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    except OSError:  # no more files may be opened: perhaps the very failure
        told = 2
    faulthandler.dump_traceback_later(seconds, exit=True, file=told)  # in C, without Python's lock


@contextmanager
def watched(started_s: float = STARTED_S) -> Iterator[None]:
    """End the job, and name lost ranks, unless this node's ranks all live while open. The code inside must let threads run."""
    node_processes, over = NodeProcesses(started_s=started_s), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            lost = node_processes.lost(time.monotonic())
            if lost and not over.is_set():
                _end(node_processes, ", ".join(lost))

    thread = threading.Thread(target=watch, name="node_processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end(node_processes: NodeProcesses, lost: str) -> NoReturn:
    """End the job; a single rank of the node says why and tells the launcher."""
    name = f"mpisgd-{os.environ.get('PMIX_NAMESPACE', '')}"
    leave_within(FORWARD_S + END_S)
    speaks = hold(name) or not is_held(name)
    if speaks:
        last_words(
            f"mpisgd: lost on {socket.gethostname()}, while MPI was starting: {lost}; the job is ended, nothing was begun:"
            " every rank of the launcher must come to mpisgd"
        )
    time.sleep(FORWARD_S)
    if speaks:
        node_processes.end_job()
    time.sleep(END_S)
    os._exit(EXIT_FAILED)


def hold(name: str) -> socket.socket | None:
    """Hold a name while the socket lives; return None if another process does."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0{name}")
        holder.listen()
    except OSError:
        holder.close()
        return None
    return holder


def is_held(name: str) -> bool:
    """Return whether a process of this user holds a name."""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        try:
            asking.connect(f"\0{name}")
        except BlockingIOError:  # a full queue: anybody who knows the name can fill it
            return _listens(name)
        _, user, _ = struct.unpack("iII", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
        return bool(user == os.geteuid())
    return False


def _listens(name: str, proc: Path = Path("/proc")) -> bool:
    """Return whether this user's processes listen at a name: slow, but no full queue hides it."""
    lines = (line.split(maxsplit=7) for line in (proc / "net" / "unix").read_text().splitlines())
    listening = {f"socket:[{words[6]}]" for words in lines if words[7:] == [f"@{name}"] and words[3] == _LISTENING}
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or not ours
            for path in list((process / "fd").iterdir()) if process.stat().st_uid == os.geteuid() else []:
                with contextlib.suppress(OSError):
                    if str(path.readlink()) in listening:
                        return True
    return False
