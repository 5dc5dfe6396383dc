"""Lock of a run's directory, for one writing job at a time.

Another job takes over only if the holder is known to be gone:

    the process is gone     seen from the same kernel (boot id) and process namespace: a container may share host name and numbers
    the job began anew      a requeue: same batch job and array element, another start; in the same start, a job step may be alive

To follow the lock L is to make the file `.LOCK.after.ID`, ID being the checksum of L's unique text: a single job can. Later jobs
follow this chain. A maker whose file is its end renames the file to LOCK; others remove theirs, and look again. Link and rename
are atomic on NFS too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import socket
import stat
import uuid
import zlib
from pathlib import Path
from typing import NamedTuple

from mpisgd.base import durable
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.storage import cause
from mpisgd.records.log import schema, sums

_MOST = 1 << 16
#: Errors of file systems without hard links.
_LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class _System(NamedTuple):
    """Environment variables of a batch system; `first`: `start` of a first start, if unset."""

    job: str
    more: tuple[str, ...]
    start: str
    first: str
    step: str


_SYSTEMS = (
    _System("SLURM_JOB_ID", ("SLURM_CLUSTER_NAME",), "SLURM_RESTART_COUNT", "0", "SLURM_STEP_ID"),
    _System("LSB_JOBID", ("LSB_JOBINDEX",), "LS_JOBPID", "", "LSF_PM_TASKID"),
    _System("PBS_JOBID", ("PBS_ARRAY_INDEX",), "PBS_JOBCOOKIE", "", "PBS_TASKNUM"),
)


class Lock:
    """Lock of a run's directory. Raises ConfigError if another job holds the lock."""

    def __init__(self, run: Path) -> None:
        self._path = run / schema.LOCK
        self._text = sums.sealed_json(_mine())
        while True:
            chain = _chain(run)
            if not chain:
                if self._make(self._path, self._text):
                    return
                continue
            last, text = chain[-1]
            if who := _held_by(text):
                raise ConfigError(
                    f"{run} is being written by another job, {who}; if the other job has ended, remove {last} and try again"
                )
            place = _after(run, text)
            if self._make(place, self._text) and self._settle(run, place):
                return

    def _settle(self, run: Path, place: Path) -> bool:
        """Return whether the chain leads to the file made; rename it to LOCK."""
        try:
            chain = _chain(run)
            if chain and chain[-1][1] == self._text:
                place.rename(self._path)
                for passed, _ in chain[1:-1]:  # left by killed jobs
                    passed.unlink(missing_ok=True)
                return True
            place.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        return False

    def _make(self, place: Path, text: str) -> bool:
        """Make a file whole, or not at all: link a private file; False if the name exists."""
        own = self._path.with_name(f".{schema.LOCK}.{socket.gethostname()}.{os.getpid()}")
        try:
            own.write_text(text)
            durable.sync(own)  # an empty lock after a loss of power would block everybody
            os.link(own, place)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _LINKLESS and own.exists():
                return _make_in_place(place, text)
            if isinstance(error, FileNotFoundError) and place.parent.is_dir():  # the holder has emptied the directory
                return False
            raise self._cannot(error) from error
        finally:
            own.unlink(missing_ok=True)
        return True

    def _cannot(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path.parent} cannot be locked: {self._path.name} cannot be made: {cause(error)}")

    def release(self) -> None:
        with contextlib.suppress(OSError):  # the next job sees that this process has ended
            if self._path.read_text() == self._text:
                self._path.unlink()


def _chain(run: Path) -> list[tuple[Path, str]]:
    """Return LOCK and its followers, with texts; the last has the lock."""
    chain: list[tuple[Path, str]] = []
    path = run / schema.LOCK
    while True:
        try:
            text = _text_of(path)
        except FileNotFoundError:
            return chain
        except (OSError, ValueError) as error:
            return [*chain, (path, f"({type(error).__name__})")]
        if any(text == passed for _, passed in chain):  # no two locks say the same
            return [*chain, (path, "(as one before)")]
        chain.append((path, text))
        path = _after(run, text)


def _text_of(path: Path) -> str:
    """Read a lock. Raises OSError, or ValueError for no file of at most `_MOST` letters."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        text = file.read(_MOST + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
    if not text or len(text) > _MOST:
        raise ValueError(f"{path} is no lock")
    return text


def _after(run: Path, text: str) -> Path:
    return run / f".{schema.LOCK}.after.{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _make_in_place(place: Path, text: str) -> bool:
    """Make the lock without hard links; a job killed within leaves an empty lock."""
    try:
        with place.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _held_by(text: str) -> str:
    """Describe the possible holder; "" if none. A damaged lock may be of a live process."""
    try:
        holder = sums.checked(schema.LOCK, json.loads(text), _mine())
        host, pid, job, since = str(holder["host"]), int(holder["pid"]), str(holder["job"]), str(holder["since"])
    except (ValueError, KeyError, TypeError, DataError) as error:
        return f"with an unreadable {schema.LOCK} ({type(error).__name__})"
    mine = _mine()

    def same(*names: str) -> bool:
        return all(mine[name] and holder.get(name) == mine[name] for name in names)

    if same("boot", "processes"):
        if _gone(pid, str(holder.get("begun"))):
            return ""
    elif same("job") and mine["start"] and holder.get("start") and not same("start"):
        return ""
    elsewhere = " in another container" if same("boot") and not same("processes") else ""
    return f"process {pid} on {host}{elsewhere}{f' (batch job {job})' if job else ''}, since {since}"


def _mine() -> dict[str, str | int]:
    system = next((each for each in _SYSTEMS if os.environ.get(each.job)), None)
    job = start = step = ""
    if system is not None:
        job = "-".join(os.environ[name] for name in (system.job, *system.more) if os.environ.get(name))
        start, step = os.environ.get(system.start, "") or system.first, os.environ.get(system.step, "")
    return {
        "host": socket.gethostname(),
        "boot": _read(Path("/proc/sys/kernel/random/boot_id")),
        "processes": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "begun": _begun("self"),
        "job": job,
        "start": start and f"{zlib.crc32(start.encode()):08x}",  # PBS's is a secret
        "step": step,
        "nonce": uuid.uuid4().hex,  # no two locks say the same
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _gone(pid: int, begun: str) -> bool:
    """Return whether a process has ended; another may have its number."""
    if _link("/proc/self") == str(os.getpid()):  # else /proc shows the numbers of another namespace
        found = _begun(str(pid))
        if found:
            return found != begun
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's, maybe hidden in /proc
        pass
    return False


def _begun(process: str) -> str:
    """Return a process's start in kernel ticks; "" if unknown."""
    fields = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
