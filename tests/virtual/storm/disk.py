"""A disk that loses its power: what was not synced is forgotten, as `base/durable.py` says; the worst that POSIX allows.

A file keeps what it had when it was last synced, through whatever name; a directory the names that it had when it was. Files are
small here, so that a copy of each may be kept. `tests/faults/power.py` does it to a real file system, as root.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mpisgd.base import durable


class Disk:
    """What would be there after a loss of power, below a directory that stays."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[Path, dict[str, int]] = {}
        self._contents: dict[int, bytes] = {}
        self._held: dict[int, int] = {}
        """Open descriptors: so no number of a file is given to another."""
        for path in (root, *root.rglob("*")):  # is there to stay
            self._sync(path)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile it takes note of what is synced."""
        with mock.patch.object(durable, "sync", self._sync):
            yield

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _sync(self, path: Path) -> None:
        if path.is_dir():
            self._names[path] = {each.name: self._hold(each) for each in path.iterdir() if not each.is_symlink()}
        else:
            self._contents[self._hold(path)] = path.read_bytes()

    def _hold(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def lose_power(self) -> None:
        self._forget(self._root)

    def _forget(self, directory: Path) -> None:
        names = self._names.get(directory, {})
        for path in list(directory.iterdir()):
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, number in names.items():
            path = directory / name
            if path.is_dir():
                self._forget(path)
            elif path in self._names:  # it was removed, which is forgotten
                path.mkdir()
                self._forget(path)
            else:
                path.unlink(missing_ok=True)
                path.write_bytes(self._contents.get(number, b""))
