"""Rows of an HDF5 dataset, written and read by HDF5's own calls.

h5py's slices look at types and selections anew each time: a flush took 2.8 ms, in which nobody was answered, and takes 0.5 so.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np


class Rows:
    """A dataset's rows, along its first dimension; it must stay open for as long.

    All raise what h5py does where HDF5 cannot read or write: OSError, RuntimeError, ValueError (`storage.writing` names the file).
    """

    def __init__(self, dataset: Any) -> None:
        self._id = dataset.id
        self._dtype = np.dtype(dataset.dtype)
        self._type = h5py.h5t.py_create(self._dtype)
        self._row: tuple[int, ...] = tuple(dataset.shape[1:])

    def extend(self, start: int, rows: np.ndarray) -> None:
        """Write rows behind the first `start` ones, which are all that count."""
        self._id.set_extent((start + len(rows), *self._row))
        self.write(start, rows)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write (n, ...) rows, C-contiguous and of the dataset's type, in the place of those from `start` on."""
        self._id.write(*self._places(start, len(rows)), rows, self._type)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the rows from `start` to before `stop`: (stop - start, ...), of the dataset's type."""
        rows = np.empty((stop - start, *self._row), self._dtype)
        self._id.read(*self._places(start, stop - start), rows, self._type)
        return rows

    def flush(self) -> None:
        """Hand them to the kernel."""
        self._id.flush()

    def _places(self, start: int, count: int) -> tuple[Any, Any]:
        """In memory, and in the file."""
        shape = (count, *self._row)
        there = self._id.get_space()
        there.select_hyperslab((start, *(0 for _ in self._row)), shape)
        return h5py.h5s.create_simple(shape), there
