"""The papers' data sets, and the user's own.

`load` is for a config, `as_dataset` for the Python API: `(train, test)`, or a factory of it. Each is a pair (inputs, targets) of
tensors or arrays, or a torch Dataset, map-style or a stream, of (input, target), or of any nest of tensors for an own step.
"""

from __future__ import annotations

from mpisgd.config import (
    Cifar10Options,
    CustomDataOptions,
    DataOptions,
    DigitsOptions,
    FashionMnistOptions,
    Hdf5Options,
    MnistOptions,
    SyntheticOptions,
    kind_of,
)
from mpisgd.data import cifar10, custom, digits, hdf5, mnist, synthetic
from mpisgd.data.custom import as_dataset
from mpisgd.data.dataset import Batch, DataSet, Split, fetch, fetch_each, set_aside
from mpisgd.data.loader import check_batch_size, check_workers
from mpisgd.data.stream import Reading

__all__ = [
    "Batch",
    "DataSet",
    "Reading",
    "Split",
    "as_dataset",
    "check_batch_size",
    "check_workers",
    "fetch",
    "fetch_each",
    "load",
    "set_aside",
]


def load(options: DataOptions, *, data_dir: str = "", seed: int, nested: bool = False, reading: Reading | None = None) -> DataSet:
    """Return the data set of `options`; `nested` and `reading` are as in `as_dataset`. Raises DataError, ConfigError."""
    match options:
        case DigitsOptions():
            data = digits.load(options.subtract_mean)
        case MnistOptions() | FashionMnistOptions():
            data = mnist.load(kind_of(options), data_dir, options.subtract_mean, options.scale)
        case Cifar10Options():
            data = cifar10.load(data_dir, options.subtract_mean, options.scale)
        case Hdf5Options():
            data = hdf5.load(options, data_dir)
        case SyntheticOptions():
            data = synthetic.load(options, seed)
        case CustomDataOptions():
            data = custom.load(options, data_dir=data_dir, seed=seed, nested=nested, reading=reading)
    return data
