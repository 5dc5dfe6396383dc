"""Any HDF5 file with inputs and targets, one sample per entry of the first axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mpisgd.base.errors import ConfigError, DataError, nearest
from mpisgd.config import Hdf5Options
from mpisgd.data.dataset import DataSet, Split, make_dataset, make_split, subtract_mean
from mpisgd.data.files import data_roots, first_existing


def load(options: Hdf5Options, data_dir: str) -> DataSet:
    """Inputs of any shape, floats or uint8 (not scaled); an empty `test_inputs` means no test split.

    Raises ConfigError where no file is named, DataError where it is missing, foreign, truncated or lacks a data set.
    """
    import h5py

    if not options.path:
        raise ConfigError("data.path = '': expected the path of an HDF5 file")
    path = _find(options.path, data_dir)
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        nbytes = path.stat().st_size
        raise DataError(f"{path}: {nbytes} bytes found, expected a whole HDF5 file: {error}") from error
    with file:
        train = _split(file, path, options.train_inputs, options.train_targets)
        test = _split(file, path, options.test_inputs, options.test_targets) if options.test_inputs else None
    if options.subtract_mean and train.inputs.dtype == torch.int64:
        raise ConfigError(
            f"data.subtract_mean = True: expected floats or uint8 in {options.train_inputs} of {path}, found integers"
        )
    if options.subtract_mean and len(train):
        train, subtracted = subtract_mean(train, train if test is None else test)
        test = None if test is None else subtracted
    return make_dataset(str(path), train, test, DataError)


def _find(named: str, data_dir: str) -> Path:
    path = Path(named).expanduser()
    candidates = [path] if path.is_absolute() else [path, *(root / path for root in data_roots(data_dir))]
    found = first_existing(candidates)
    if found is None:
        places = ", ".join(str(candidate.absolute()) for candidate in candidates)
        raise DataError(f"data.path = {named!r}: there is no such file; looked at: {places}")
    return found


def _split(file: Any, path: Path, inputs: str, targets: str) -> Split:
    return make_split(_array(file, path, inputs), _array(file, path, targets), f"{path}: {inputs}, {targets}", DataError)


def _array(file: Any, path: Path, name: str) -> Any:
    """The whole data set `name` as a numpy array."""
    import h5py

    data_set = file.get(name)
    if not isinstance(data_set, h5py.Dataset):
        known: list[str] = []
        file.visititems(lambda key, item: known.append(key) if isinstance(item, h5py.Dataset) else None)
        raise DataError(f"{path}: there is no data set {name!r}{nearest(name, known)}")
    if data_set.ndim < 1:
        raise DataError(f"{path}: {name} is a single value, expected the first axis to number the samples")
    try:
        return data_set[...]
    except OSError as error:
        raise DataError(f"{path}: {name} cannot be read: {error}") from error
