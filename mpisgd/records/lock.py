"""Lock of a run's directory, so that one job at a time writes there: a file that the first makes, and removes when it ends.

A job that is killed leaves it behind. It is taken over only where it can be known that its holder is no more:

    the process is gone     seen from the same kernel (boot id) and the same process namespace, in which its number means the same:
                            a container may have the host's name, or its process numbers, and be another
    the job began anew      the same batch job, and element of an array, but another start of it: a requeue. What else runs in the
                            same start, another job step, may well be alive

Otherwise whoever comes is refused, and told what to remove.

Of several that find the lock of one that is no more, one takes it over. To follow the lock L is to make the file `.LOCK.after.ID`,
ID being the checksum of what L says, which is said once. Of all that may follow L, one makes it; whoever comes later looks at the
end of that chain, which begins with LOCK. Who has made the file looks whether LOCK leads to it. If so it has the lock, and renames
the file to LOCK. If not, somebody has done all that meanwhile: it removes the file, and looks again. All rests on link and rename,
which are whole or nothing, on NFS too.
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
"""Letters of a lock."""
#: What file systems without hard links say.
_LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class _System(NamedTuple):
    """The variables in which a batch system tells a job its number, what tells apart the elements of an array that have one number,
    and the starts of one job; `first`: what the last says at the first start, where it is not set then.
    """

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
    """The lock of a run's directory; `release` removes it. A job that is killed leaves it behind: see above.

    Raises ConfigError where another job holds it.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / schema.LOCK
        self._text = sums.sealed_json(_mine())
        while True:
            chain = _chain(run)
            if not chain:
                if self._make(self._path, self._text):
                    return
                continue
            _check(run, *chain[-1])
            place = _after(run, chain[-1][1])
            if self._make(place, self._text) and self._settle(run, place):
                return

    def _settle(self, run: Path, place: Path) -> bool:
        """Whether the chain leads to the file that was made; then it is LOCK."""
        try:
            chain = _chain(run)
            if chain and chain[-1][1] == self._text:
                place.rename(self._path)
                for passed, _ in chain[1:-1]:  # of those who were killed before they came here
                    passed.unlink(missing_ok=True)
                return True
            place.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        return False

    def _make(self, place: Path, text: str) -> bool:
        """Make a file whole, or not at all: a link to a file of its own, which fails where it exists."""
        own = self._path.with_name(f".{schema.LOCK}.{socket.gethostname()}.{os.getpid()}")
        try:
            own.write_text(text)
            durable.sync(own)  # one that is empty after a loss of power would be in everybody's way
            os.link(own, place)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _LINKLESS and own.exists():
                return _make_in_place(place, text)
            if isinstance(error, FileNotFoundError) and place.parent.is_dir():  # who holds the lock has emptied the directory
                return False
            raise self._cannot(error) from error
        finally:
            own.unlink(missing_ok=True)
        return True

    def _cannot(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path.parent} cannot be locked: {self._path.name} cannot be made: {cause(error)}")

    def release(self) -> None:
        with contextlib.suppress(OSError):  # whoever comes next sees that this process has ended
            if self._path.read_text() == self._text:
                self._path.unlink()


def check(run: Path) -> None:
    """Raises ConfigError where a job that may be alive holds the lock, and says how to remove it."""
    for end in _chain(run)[-1:]:
        _check(run, *end)


def _check(run: Path, path: Path, text: str) -> None:
    """The same of the end of a chain."""
    who = _held_by(text)
    if who:
        raise ConfigError(f"{run} is being written by another job, {who}; if that job has ended, remove {path} and try again")


def _chain(run: Path) -> list[tuple[Path, str]]:
    """LOCK and those who have taken it over, one after the other, and what each says; the last one has it. Empty: nobody."""
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
    """Read the text of a lock. Raises OSError where there is none, ValueError for what is no file of at most `_MOST` letters."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        text = file.read(_MOST + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
    if not text or len(text) > _MOST:
        raise ValueError(f"{path} is no lock")
    return text


def _after(run: Path, text: str) -> Path:
    """The file of who follows the lock that says this."""
    return run / f".{schema.LOCK}.after.{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _make_in_place(place: Path, text: str) -> bool:
    """Make the lock without hard links: whoever makes the file has it; one that dies before the next line leaves it empty."""
    try:
        with place.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _held_by(text: str) -> str:
    """Say who holds, or may hold, a lock with this text; "" where nobody does. What is damaged may be of a process that lives."""
    try:
        holder = sums.checked(schema.LOCK, json.loads(text), _mine())
        host, pid, job, since = str(holder["host"]), int(holder["pid"]), str(holder["job"]), str(holder["since"])
    except (ValueError, KeyError, TypeError, DataError) as error:
        return f"whose {schema.LOCK} cannot be read ({type(error).__name__})"
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
    """Entries of this process; "" is what cannot be known."""
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
    """Whether a process of this namespace is no more; another may have its number by now."""
    if _link("/proc/self") == str(os.getpid()):  # else /proc shows the numbers of another namespace
        found = _begun(str(pid))
        if found:
            return found != begun
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's, which /proc may hide
        pass
    return False


def _begun(process: str) -> str:
    """Tick at which it began, since the kernel did; "" where that is not told."""
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
