"""One job at a time writes into a run's directory: a file that the first makes, and removes when it ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
from pathlib import Path

from mpisgd.errors import ConfigError
from mpisgd.records import schema
from mpisgd.records.storage import cause

#: What file systems without hard links say.
_LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


class Lock:
    """The lock of a run's directory; `release` removes it. A job that is killed leaves it behind, see `check`.

    Raises ConfigError where another job holds it.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / schema.LOCK
        text = json.dumps(_mine())
        while not self._make(text):
            check(run)
            self._take_away()

    def _make(self, text: str) -> bool:
        """Make it whole, or not at all: a link to a file of its own, which fails where it exists."""
        own = self._path.with_name(f".{schema.LOCK}.{socket.gethostname()}.{os.getpid()}")
        try:
            own.write_text(text)
            os.link(own, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _LINKLESS and own.exists():
                return self._make_in_place(text)
            raise ConfigError(f"{self._path.parent} cannot be locked: {self._path.name} cannot be made: {cause(error)}") from error
        finally:
            own.unlink(missing_ok=True)
        return True

    def _make_in_place(self, text: str) -> bool:
        """Where there are no hard links: whoever makes the file has it; one that dies before the next line leaves it empty."""
        try:
            with self._path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def _take_away(self) -> None:
        """Of two jobs that see the lock of a dead one, one may have made its own by now: that is put back."""
        away = self._path.with_name(f".{schema.LOCK}.stale.{socket.gethostname()}.{os.getpid()}")
        try:
            self._path.rename(away)
        except FileNotFoundError:
            return
        why = _held_by(away)
        if why:
            with contextlib.suppress(OSError):  # no hard links here
                os.link(away, self._path)
        away.unlink()

    def release(self) -> None:
        with contextlib.suppress(OSError):  # whoever comes next sees that this process has ended
            self._path.unlink()


def check(run: Path) -> None:
    """Raises ConfigError where a job that may be alive holds the lock, and says how to remove it.

    A lock is left behind by a process of this host that has ended, and by an earlier start of the very same batch job (requeued).
    """
    path = run / schema.LOCK
    who = _held_by(path)
    if who:
        raise ConfigError(f"{run} is being written by another job, {who}; if that job has ended, remove {path} and try again")


def _held_by(path: Path) -> str:
    """Who holds it, in words; "" where nobody does."""
    try:
        holder = json.loads(path.read_text())
        host, pid, job = str(holder["host"]), int(holder["pid"]), str(holder["job"])
        begun, since = str(holder["begun"]), str(holder["since"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"whose {path.name} cannot be read ({type(error).__name__})"
    mine = _mine()
    alive = _begun(pid) == begun if host == mine["host"] else not job or job != mine["job"]
    return f"process {pid} on {host}{f' (batch job {job})' if job else ''}, since {since}" if alive else ""


def _mine() -> dict[str, str | int]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "begun": _begun(os.getpid()),
        "job": next((os.environ[name] for name in _JOBS if os.environ.get(name)), ""),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _begun(pid: int) -> str:
    """When a process of this host began, so that another of the same number is not taken for it; "-" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    try:  # no /proc: all that can be known is whether there is one
        os.kill(pid, 0)
    except ProcessLookupError:
        return "-"
    except PermissionError:
        pass
    return "+"
