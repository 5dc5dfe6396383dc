"""Disks that are full, quotas, directories that vanish: what cannot be written is named, with the mend (DESIGN 4, law 9).

A log that cannot be written ends the run: it is the proof. A checkpoint that cannot be written does not (`checkpoints`).
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
_LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

#: What can be done about it.
MENDS = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "remove something of yours, or ask for a larger quota",
    errno.EFBIG: "raise the limit of file sizes, `ulimit -f`",
    errno.EROFS: "mount it for writing",
    errno.ENOENT: "see who removed it, or that its file system is mounted",
    errno.ESTALE: "see who removed it, or that its file system is mounted",
    errno.EACCES: "give yourself leave to write there",
    errno.EPERM: "give yourself leave to write there",
    errno.EAGAIN: "see which process has locked it, `lsof` tells",
    errno.EIO: "ask who looks after the disk or the file server",
}

_broken: list[Any] = []


def cause(error: BaseException) -> str:
    """Say what went wrong with a file, and the mend, in a few words; HDF5 hides the number of the error in its text."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _ERRNO.search(str(error))):
        number = int(found[1])
    if number is None:
        return " ".join(str(error).split()) or type(error).__name__
    mend = MENDS.get(number)
    return f"{os.strerror(number)}{f': {mend}' if mend else ''}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file of the run that is being written. Raises StorageError where it cannot be."""
    told = sys.unraisablehook

    def quiet(unraisable: Any) -> None:  # h5py would say the same again of each handle that it drops
        if not str(unraisable.exc_value).startswith("Can't decrement id ref count"):
            told(unraisable)

    sys.unraisablehook = quiet
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # h5py raises all of these, torch.save the second
        raise StorageError(f"{path} cannot be written: {cause(error)}") from error
    finally:
        sys.unraisablehook = told


def create_hdf5(path: Path) -> h5py.File:
    """A new HDF5 file, locked where the file system has locks, in the place of whatever has its name.

    HDF5's own best effort knows only systems that say ENOSYS; NFS without its lock daemon says ENOLCK. No lock is needed: one job
    at a time writes into a run's directory (`lock`), each rank a file of its own.
    """
    try:
        return h5py.File(path, "w", libver="latest", locking="best-effort")
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
    return h5py.File(path, "w", libver="latest", locking=False)


def give_up(file: h5py.File, handles: object = None) -> None:
    """Never touch a file again of which a write has failed: HDF5 would crash as the process ends (TRAPS 8).

    It keeps what it could not write, and tries again when it closes the file, or the last of the handles that it was written by, at
    the latest at exit; so that is left out.
    """
    if not _broken:
        atexit.register(_leave)
    _broken.append((file, handles, sys.exception()))  # whose traceback holds on to handles


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)
