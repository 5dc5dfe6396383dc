"""Any HDF5 file with inputs and targets, one sample per entry of the first axis, read per mini-batch.

HDF5 caches uncompressed chunks, `data.cache_nbytes` per data set. The start searches all targets in blocks for the largest.
"""

from __future__ import annotations

import math
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpisgd.base.checks import expanded
from mpisgd.base.errors import ConfigError, DataError, nearest
from mpisgd.config import Hdf5Options
from mpisgd.data.dataset import Batch, DataSet, Split, as_inputs, as_targets, make_dataset, mean_of, ordinary
from mpisgd.data.files import data_roots, first_existing

_SEARCHED_NBYTES = 2**28
"""Most bytes of targets to search."""
_BLOCK_NBYTES = 2**22
_CACHE_SLOTS = 100_003
"""Places of HDF5's chunk cache: a prime, many times the chunks; 0.8 MB."""
_GOOD_CHUNK_NBYTES = 2**16
_DEAR = 64
"""Bytes read per byte of a sample that deserve a warning."""


def load(options: Hdf5Options, data_dir: str) -> DataSet:
    """Return inputs of any shape, floats or uint8 (not scaled); no test split for an empty `test_inputs`."""
    if not options.path:
        raise ConfigError("data.path = '': expected the path of an HDF5 file")
    path = _find(options.path, data_dir)
    pairs = [(options.train_inputs, options.train_targets)]
    if options.test_inputs:
        pairs.append((options.test_inputs, options.test_targets))
    file = _open(path)
    arrays = [[_Rows(file, path, name, options.cache_nbytes) for name in pair] for pair in pairs]
    splits = [Hdf5Split(inputs, targets, options.classes) for inputs, targets in arrays]
    train = splits[0]
    if options.subtract_mean and not train.has_mean:
        raise ConfigError(
            f"data.subtract_mean = True: expected floats or uint8 in {options.train_inputs} of {path}, found integers"
        )
    data = make_dataset(str(path), train, splits[1] if len(splits) > 1 else None, DataError)
    if options.subtract_mean:
        mean = train.mean_input()
        for split in splits:
            split.subtracted = mean
    return data


def _find(named: str, data_dir: str) -> Path:
    path = Path(expanded(named))
    candidates = [path] if path.is_absolute() else [path, *(root / path for root in data_roots(data_dir))]
    found = first_existing(candidates)
    if found is None:
        places = ", ".join(str(candidate.absolute()) for candidate in candidates)
        raise DataError(f"data.path = {named!r}: found no file; looked at: {places}")
    return found


def _open(path: Path) -> Any:
    import h5py

    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        nbytes = path.stat().st_size
        raise DataError(f"{path}: {nbytes} bytes found, expected a whole HDF5 file: {error}") from error


class _Rows:
    """Data set `name` of a file, read by rows, in types of torch.

    Args:
        cache_nbytes: of uncompressed chunks; holds at least one.
    """

    def __init__(self, file: Any, path: Path, name: str, cache_nbytes: int) -> None:
        import h5py

        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            known: list[str] = []
            file.visititems(lambda key, item: known.append(key) if isinstance(item, h5py.Dataset) else None)
            raise DataError(f"{path}: there is no data set {name!r}{nearest(name, known)}")
        if found.ndim < 1:
            raise DataError(f"{path}: {name} is a single value, expected the first axis to number the samples")
        self.name = name
        self.path = path
        self.shape: tuple[int, ...] = found.shape
        self.dtype: np.dtype[Any] = found.dtype
        self.nbytes: int = found.nbytes
        self.chunks: tuple[int, ...] | None = found.chunks
        self.chunk_nbytes: int = math.prod(self.chunks) * found.dtype.itemsize if self.chunks else 0
        self.cache_nbytes = max(cache_nbytes, self.chunk_nbytes)
        del found  # else HDF5 keeps the cache of the first opening
        cache = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        cache.set_chunk_cache(_CACHE_SLOTS, self.cache_nbytes, 0.0)  # the least recently used chunk goes first
        self._file = file  # keeps the file open
        self._found = h5py.Dataset(h5py.h5d.open(file.id, name.encode(), cache))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        return ordinary(self._read(rows.start, rows.stop), f"{self.path}: {self.name}", DataError)

    def at(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Return samples, read in the order of the file: a chunk's together."""
        ordered, places = np.unique(indices, return_inverse=True)
        begins = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)  # of runs of neighbours
        runs = [self._read(int(run[0]), int(run[-1]) + 1) for run in np.split(ordered, begins[1:]) if len(run)]
        read = np.concatenate(runs) if runs else self._read(0, 0)
        return torch.from_numpy(ordinary(read[places], f"{self.path}: {self.name}", DataError))

    def _read(self, first: int, after: int) -> npt.NDArray[Any]:
        try:
            read: npt.NDArray[Any] = self._found[first:after]
        except OSError as error:
            raise DataError(f"{self.path}: {self.name} cannot be read: {error}") from error
        return read

    def largest(self) -> int:
        largest, rows = -1, max(1, _BLOCK_NBYTES * len(self) // max(1, self.nbytes))
        for first in range(0, len(self) if self.nbytes else 0, rows):
            block = self[first : first + rows]
            if len(self.shape) == 1 and block.min() < 0:
                raise DataError(f"{self.path}: {self.name}: a target is {block.min()}, expected classes from 0")
            largest = max(largest, int(block.max()))
        return largest


class Hdf5Split(Split):
    """Samples of two data sets of an open file.

    Args:
        told: the user's number of classes; 0 = not told.

    Attributes:
        subtracted: (*shape) float32, subtracted from inputs.
        own: numbers of own samples; None = all.
    """

    def __init__(self, inputs: _Rows, targets: _Rows, told: int) -> None:
        self._inputs = inputs
        self._targets = targets
        self.subtracted: Tensor | None = None
        self.own: npt.NDArray[np.int64] | None = None
        where = f"{inputs.path}: {inputs.name}, {targets.name}"
        for part, rows in (("inputs", inputs), ("targets", targets)):
            ordinary(np.empty(0, rows.dtype), f"{where}: {part}", DataError)
        if len(inputs) != len(targets):
            raise DataError(f"{where}: {len(inputs)} inputs but {len(targets)} targets, expected one target per input")
        self._classes = self._count(told)

    def _count(self, told: int) -> int | None:
        targets = self._targets
        if targets.dtype.kind == "f":
            return targets.shape[1] if len(targets.shape) > 1 else 1
        if told:
            return told
        return targets.largest() + 1 if targets.nbytes <= _SEARCHED_NBYTES else None

    def __len__(self) -> int:
        return len(self._inputs if self.own is None else self.own)

    def part(self, chosen: npt.NDArray[np.int64]) -> Hdf5Split:
        part = copy(self)
        part.own = chosen if self.own is None else self.own[chosen]
        return part

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        indices = indices if self.own is None else self.own[indices]
        inputs = as_inputs(self._inputs.at(indices))
        if self.subtracted is not None:
            inputs = inputs.sub_(self.subtracted)
        return inputs, as_targets(self._targets.at(indices))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self._inputs.shape[1:]

    @property
    def has_mean(self) -> bool:
        """Inputs are values, not token numbers."""
        return self._inputs.dtype.kind == "f" or self._inputs.dtype == np.uint8

    def mean_input(self) -> Tensor:
        return mean_of(self._inputs)

    @property
    def classes(self) -> int | None:
        """Number of outputs for float targets; else `told`, or largest target + 1; None for too many targets."""
        return self._classes

    @property
    def advice(self) -> str:
        inputs = self._inputs
        if not inputs.chunks or not len(self) or inputs.nbytes <= inputs.cache_nbytes:
            return ""
        touched = math.prod(-(-size // chunk) for size, chunk in zip(inputs.shape[1:], inputs.chunks[1:], strict=True))
        sample_nbytes, read_nbytes = inputs.nbytes // len(self), touched * inputs.chunk_nbytes
        if read_nbytes < max(_DEAR * sample_nbytes, 4 * _GOOD_CHUNK_NBYTES):
            return ""
        better = (max(1, _GOOD_CHUNK_NBYTES // sample_nbytes), *inputs.shape[1:])
        return (
            f"{inputs.path}: {inputs.name} has chunks of {inputs.chunks}: {read_nbytes:,} bytes are read for a sample of"
            f" {sample_nbytes:,} without a cached chunk: store chunks of whole samples, e.g. {better}, or say"
            f" data.cache_nbytes = {inputs.nbytes}"
        )
