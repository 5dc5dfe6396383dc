"""Files that outlive a loss of power: written aside, synced, renamed, and the directory synced, which has the name.

A rename alone makes a file whole for whoever reads it later on the same machine; what is on the disk after a loss of power is what
was synced, and nothing else (TRAPS 9, 10). So what others refer to is synced before they are written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What file systems say that cannot sync a directory.
_SYNCLESS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_thrown_away: list[bool] = []


def aside_of(path: Path) -> Path:
    """The name of a file while this process makes it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """The name under which a file is to be made, and closed; then it is synced, and gets its own. Raises OSError.

    Where it cannot be made, its room is given back. Whoever refers to it syncs its directory.
    """
    aside = aside_of(path)
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def written_aside(path: Path) -> Iterator[io.FileIO]:
    """Open a file aside for writing and reading, which takes the path's place at the end. Its mode is that of the user's umask."""
    with made_aside(path) as aside, aside.open("w+b", buffering=0) as raw:
        yield raw


def write(path: Path, content: bytes) -> None:
    """The whole of a file, whole or not at all, and there to stay. Raises OSError."""
    with written_aside(path) as raw:
        write_all(raw, content)
    sync_directory(path.parent)


def write_all(raw: io.FileIO, content: bytes | memoryview) -> None:
    """All of it: a call may write a part."""
    left = memoryview(content).cast("B")
    while left:
        left = left[raw.write(left) :]


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each there to stay. Raises OSError: also where it exists."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    path.mkdir(parents=True)
    for each in missing:
        sync_directory(each.parent)


@contextmanager
def thrown_away() -> Iterator[None]:
    """Sync nothing meanwhile: what this process makes is not to be kept."""
    _thrown_away.append(True)
    try:
        yield
    finally:
        _thrown_away.pop()


def sync(path: Path) -> None:
    """Make what has been written to a file outlive a loss of power, through whatever descriptor it was. Raises OSError."""
    if _thrown_away:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in it outlive a loss of power, where its file system can. Raises OSError."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _SYNCLESS:
            raise
