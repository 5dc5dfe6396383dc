"""Copies of a shard's slice for evaluation, spooled to a scratch file: taking one costs a copy, keeping one no memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpisgd.computing import Updates
from mpisgd.errors import DataError
from mpisgd.flat import on_host
from mpisgd.records.storage import writing


@dataclass(frozen=True)
class Taken:
    """One snapshot: theta and, where weights are averaged, thetabar, each (slice,) float32."""

    vectors: list[np.ndarray]
    clock: int
    samples: int
    taken_s: float


def check_spool(path: Path, count: int, nbytes: int) -> None:
    """Raises DataError where a scratch file does not hold so many snapshots, of so many bytes each."""
    found = path.stat().st_size if path.is_file() else -1
    if found < count * nbytes:
        what = "is not there" if found < 0 else f"has {found} bytes"
        raise DataError(f"{path} {what}, and the checkpoint says that it holds {count} snapshots, {count * nbytes} bytes")


def due(every_epochs: float, epochs_before: float, epochs: float) -> bool:
    """Whether a multiple of `every_epochs` was passed; never where that is 0."""
    if every_epochs <= 0:
        return False
    return math.floor(epochs / every_epochs) > math.floor(epochs_before / every_epochs)


class Snapshots:
    """The snapshots of one shard.

    Args:
        path: scratch file, made here; removed by `close`.
        resumed: clock, samples and seconds of the snapshots that the file holds already, of the run that is continued.
        every_epochs: epochs from one snapshot to the next; 0 = only initial and last weights.
        vectors: 1, or 2 where weights are averaged.
        size: elements of the slice.
    """

    def __init__(
        self, path: Path, *, every_epochs: float, vectors: int, size: int, resumed: Sequence[tuple[int, int, float]] = ()
    ) -> None:
        self._path = path
        self._every_epochs = every_epochs
        self._vectors = vectors
        self._size = size
        self._taken: list[tuple[int, int, float]] = [*resumed]
        with writing(path):
            self._file: BinaryIO = path.open("r+b" if resumed else "w+b")
            self._file.truncate(self.count * vectors * size * 4)

    @property
    def count(self) -> int:
        return len(self._taken)

    @property
    def taken(self) -> list[tuple[int, int, float]]:
        """Of each, its clock, samples and seconds; what it holds has been handed to the kernel."""
        with writing(self._path):
            self._file.flush()
        return list(self._taken)

    def due(self, epochs_before: float, epochs: float) -> bool:
        """Whether a multiple of `every_epochs` was passed."""
        return due(self._every_epochs, epochs_before, epochs)

    def take(self, update: Updates, clock: int, now_s: float) -> None:
        """Copy the weights as they are (into the page cache; the disk is the kernel's business)."""
        with writing(self._path):
            self._file.seek(self.count * self._vectors * self._size * 4)
            for vector in (update.weights, update.averaged):
                if vector is not None:
                    self._file.write(on_host(vector).data)
        self._taken.append((clock, update.samples, now_s))

    def get(self, index: int) -> Taken:
        with writing(self._path):
            self._file.seek(index * self._vectors * self._size * 4)  # what is still in its buffer is written first
        vectors = [np.frombuffer(self._file.read(self._size * 4), np.float32) for _ in range(self._vectors)]
        clock, samples, taken_s = self._taken[index]
        return Taken(vectors, clock, samples, taken_s)

    def nothing(self) -> list[np.ndarray]:
        """As many empty vectors as a snapshot has: there is none."""
        return [np.empty(0, np.float32)] * self._vectors

    def close(self, keep: bool = False) -> None:
        """Remove the file, or keep it for a run that continues this one."""
        with contextlib.suppress(OSError):  # what a checkpoint refers to was written before it (`taken`); the rest nobody wants now
            self._file.close()
        if not keep:
            self._path.unlink(missing_ok=True)


class Nowhere(Snapshots):
    """Keeps no snapshots: for runs that nobody evaluates."""

    def __init__(self) -> None:
        self._taken = []
        self._vectors = 1

    @property
    def taken(self) -> list[tuple[int, int, float]]:
        return []

    def due(self, epochs_before: float, epochs: float) -> bool:
        return False

    def take(self, update: Updates, clock: int, now_s: float) -> None:
        """Nothing is copied."""

    def close(self, keep: bool = False) -> None:
        """Nothing is held."""
