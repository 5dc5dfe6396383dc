"""Snapshots of a slice for evaluation, in a scratch file: each costs a copy, and no memory."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.base.storage import writing
from mpisgd.vectors.computing import Copied
from mpisgd.vectors.memory import on_host


@dataclass(frozen=True)
class Taken:
    """Theta and, with averaged weights, thetabar, each (slice,) float32."""

    vectors: list[np.ndarray]
    clock: int
    samples: int
    taken_s: float


def check_spool(path: Path, taken: Sequence[Sequence[float]], nbytes: int) -> None:
    """Raise DataError unless a scratch file holds these snapshots, each of `nbytes`."""
    found, count = path.stat().st_size if path.is_file() else -1, len(taken)
    if found < count * nbytes:
        what = "is not there" if found < 0 else f"has {found} bytes"
        raise DataError(f"{path} {what}: the checkpoint says {count} snapshots, {count * nbytes} bytes")
    if count == 0:
        return
    with path.open("rb") as file:
        for number, (*_, told) in enumerate(map(_with_sum, taken)):
            crc32, left = 0, nbytes
            while left and (piece := file.read(min(left, 1 << 20))):
                crc32, left = zlib.crc32(piece, crc32), left - len(piece)
            _compare(path, number, crc32, told)


def _with_sum(taken: Sequence[float]) -> tuple[int, int, float, int]:
    """Return a snapshot's facts; checksum -1 if an earlier mpisgd wrote none."""
    clock, samples, taken_s, *crc32 = taken
    return int(clock), int(samples), taken_s, int(crc32[0]) if crc32 else -1


def _compare(path: Path, number: int, crc32: int, told: int) -> None:
    if told >= 0 and crc32 != told:
        raise DataError(f"{path} is damaged: the checksum of snapshot {number} does not match")


def due(every_epochs: float, epochs_before: float, epochs: float) -> bool:
    """Return whether a multiple of `every_epochs` was passed; never if 0."""
    if every_epochs <= 0:
        return False
    return math.floor(epochs / every_epochs) > math.floor(epochs_before / every_epochs)


class Snapshots:
    """Snapshots of one shard.

    Args:
        resumed: clock, samples, seconds and CRC-32 of snapshots already in the file.
        every_epochs: 0 = only initial and last weights.
        vectors: 2 with averaged weights, else 1.
    """

    def __init__(
        self, path: Path, *, every_epochs: float, vectors: int, size: int, resumed: Sequence[Sequence[float]] = ()
    ) -> None:
        self._path = path
        self._every_epochs = every_epochs
        self._vectors = vectors
        self._size = size
        self._taken: list[tuple[int, int, float, int]] = [_with_sum(each) for each in resumed]
        with writing(path):
            self._file: BinaryIO = path.open("r+b" if resumed else "w+b")
            self._file.truncate(self.count * vectors * size * 4)

    @property
    def count(self) -> int:
        return len(self._taken)

    @property
    def taken(self) -> list[tuple[int, int, float, int]]:
        """Clock, samples, seconds and CRC-32 of each; bytes are with the kernel."""
        with writing(self._path):
            self._file.flush()
        return list(self._taken)

    def due(self, epochs_before: float, epochs: float) -> bool:
        return due(self._every_epochs, epochs_before, epochs)

    def take(self, update: Copied, clock: int, now_s: float) -> None:
        crc32 = 0
        with writing(self._path):
            self._file.seek(self.count * self._vectors * self._size * 4)
            for vector in (update.weights, update.averaged):
                if vector is not None:
                    copied = on_host(vector).data
                    crc32 = zlib.crc32(copied, crc32)
                    self._file.write(copied)
        self._taken.append((clock, update.samples, now_s, crc32))

    def get(self, index: int) -> Taken:
        """Return a snapshot. Raises DataError if changed."""
        nbytes = self._vectors * self._size * 4
        with writing(self._path):
            self._file.seek(index * nbytes)  # seek writes the buffer first
        content = self._file.read(nbytes)
        clock, samples, taken_s, crc32 = self._taken[index]
        _compare(self._path, index, zlib.crc32(content), crc32)
        vectors = list(np.frombuffer(content, np.float32).reshape(self._vectors, self._size))
        return Taken(vectors, clock, samples, taken_s)

    def nothing(self) -> list[np.ndarray]:
        return [np.empty(0, np.float32)] * self._vectors

    def close(self, keep: bool = False) -> None:
        with contextlib.suppress(OSError):  # snapshots of a checkpoint were written before (`taken`)
            self._file.close()
        if not keep:
            self._path.unlink(missing_ok=True)


class Nowhere(Snapshots):
    """No snapshots."""

    def __init__(self) -> None:
        self._taken = []
        self._vectors = 1

    @property
    def taken(self) -> list[tuple[int, int, float, int]]:
        return []

    def due(self, epochs_before: float, epochs: float) -> bool:
        return False

    def take(self, update: Copied, clock: int, now_s: float) -> None:
        """Copy nothing."""

    def close(self, keep: bool = False) -> None:
        """Do nothing."""
