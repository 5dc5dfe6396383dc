"""Failed writes (full disks, quotas, vanished directories), named with a remedy (DESIGN 4, law 9).

A failed log write ends the run: the log is the proof. A failed checkpoint does not.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from mpisgd.base.errors import EXIT_FAILED, StorageError

_ERRNO = re.compile(r"errno = (\d+)")
# HDF5's own best effort covers ENOSYS alone; NFS without a lock daemon says ENOLCK. No lock is needed: a run has one job (`lock`).
_LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

#: Remedies by error number.
MENDS = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "remove something of yours, or ask for a larger quota",
    errno.EFBIG: "raise the limit of file sizes, `ulimit -f`",
    errno.EROFS: "mount it for writing",
    errno.ENOENT: "check that the file system is mounted, and that nothing removed the directory",
    errno.ESTALE: "check that the file system is mounted, and that nothing removed the directory",
    errno.EACCES: "give yourself leave to write there",
    errno.EPERM: "give yourself leave to write there",
    errno.EAGAIN: "find the process with the lock, by `lsof`",
    errno.EIO: "ask the administrator of the disk or the file server",
}

_broken: list[Any] = []


def cause(error: BaseException) -> str:
    """Describe a file error and its remedy; HDF5 hides the number in its text."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _ERRNO.search(str(error))):
        number = int(found[1])
    if number is None:
        return " ".join(str(error).split()) or type(error).__name__
    mend = MENDS.get(number)
    return f"{os.strerror(number)}{f': {mend}' if mend else ''}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise StorageError, naming the file, if a write in this block fails."""
    told = sys.unraisablehook

    def quiet(unraisable: Any) -> None:  # h5py repeats the error for each dropped handle
        if not str(unraisable.exc_value).startswith("Can't decrement id ref count"):
            told(unraisable)

    sys.unraisablehook = quiet
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # h5py raises all three, torch.save a RuntimeError
        raise StorageError(f"{path} cannot be written: {cause(error)}") from error
    finally:
        sys.unraisablehook = told


def create_hdf5(path: Path) -> h5py.File:
    """Create or replace an HDF5 file, locked if the file system can."""
    try:
        return h5py.File(path, "w", libver="latest", locking="best-effort")
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
    return h5py.File(path, "w", libver="latest", locking=False)


def give_up(file: h5py.File, handles: object = None) -> None:
    """Never touch a file again after a failed write: HDF5 would crash at exit (TRAPS 8)."""
    if not _broken:
        # HDF5 retries unwritten data when it closes the file or its last handle, at the latest at exit
        atexit.register(_leave)
    _broken.append((file, handles, sys.exception()))  # the traceback holds on to handles


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)
