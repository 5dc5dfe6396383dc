"""Files that survive a loss of power: written aside, synced, renamed, then their directory synced.

Without a sync, a rename serves only readers on the same machine (TRAPS 9, 10). Sync a file before writing references to it.
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

#: Answers of file systems that cannot sync a directory.
_SYNCLESS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_thrown_away: list[bool] = []


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary name; after the block, sync the closed file and rename it. Raises OSError.

    A failure removes the temporary file. The caller syncs the directory.
    """
    aside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
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
    """Open a temporary file that replaces `path` at the end; the umask sets its mode."""
    with made_aside(path) as aside, aside.open("w+b", buffering=0) as raw:
        yield raw


def write(path: Path, content: bytes) -> None:
    """Write a file atomically and durably. Raises OSError."""
    with written_aside(path) as raw:
        write_all(raw, content)
    sync_directory(path.parent)


def write_all(raw: io.FileIO, content: bytes | memoryview) -> None:
    """Write all: one call may write a part."""
    left = memoryview(content).cast("B")
    while left:
        left = left[raw.write(left) :]


def make_directory(path: Path) -> None:
    """Make a durable directory and parents. Raises OSError, also if it exists."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    path.mkdir(parents=True)
    for each in missing:
        sync_directory(each.parent)


@contextmanager
def thrown_away() -> Iterator[None]:
    _thrown_away.append(True)
    try:
        yield
    finally:
        _thrown_away.pop()


def sync(path: Path) -> None:
    """Make a file's data durable, whichever descriptor wrote it. Raises OSError."""
    if _thrown_away:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make a directory's names durable, where possible. Raises OSError."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _SYNCLESS:
            raise
