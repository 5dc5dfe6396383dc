"""The user's own data: a DataSet, a (train, test) of samples, or a factory of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, load_attribute
from mpisgd.config import CustomDataOptions
from mpisgd.data.dataset import Batch, DataSet, LazySplit, Split, make_dataset, make_split
from mpisgd.data.loader import CollatedSplit, workers_of
from mpisgd.data.stream import Reading, Stream, is_stream

_EXPECTED = "(train, test), each a pair (inputs, targets) of tensors or arrays, or a Dataset with __len__ and __getitem__"


def load(options: CustomDataOptions, *, data_dir: str, seed: int, nested: bool = False, reading: Reading | None = None) -> DataSet:
    """Return the data of `options.factory`."""
    factory = load_attribute(options.factory, "data.factory")
    field = f"data.factory = {options.factory!r}"
    value = call_factory(factory, options.kwargs, {"data_dir": data_dir, "seed": seed}, field)
    return as_dataset(value, field, nested=nested, reading=reading)


def as_dataset(
    value: Any,
    name: str = "custom",
    offered: Mapping[str, Any] = MappingProxyType({}),
    *,
    nested: bool = False,
    reading: Reading | None = None,
) -> DataSet:
    """Return a DataSet from a DataSet, from (train, test), or from a factory, which gets the `offered` it takes.

    `nested`: a Dataset's samples need not be pairs, and are collated by torch, for an own step. `reading`: how learners read a
    stream. The test split may be None or empty. Raises ConfigError.
    """
    if isinstance(value, DataSet):
        return value
    if callable(value) and not _is_samples(value):
        value = call_factory(value, {}, offered, name)
        if isinstance(value, DataSet):
            return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name}: found {_describe(value)}, expected {_EXPECTED}")
    train, test = (_Given(each, f"{name}: {which}", nested) for each, which in zip(value, ("train", "test"), strict=True))
    if train.is_stream and reading is None:
        raise ConfigError(
            f"{train.where}: found a stream, {_describe(train.samples)}, expected sampling = 'stream', or a Dataset with"
            " __len__ and __getitem__"
        )
    splits = (_split(train, reading), None if test.value is None else _split(test, None))
    return make_dataset(name, *splits, ConfigError)


class _Given(NamedTuple):
    value: Any
    where: str
    nested: bool

    @property
    def samples(self) -> Any:
        return self.value.dataset if isinstance(self.value, DataLoader) else self.value

    @property
    def is_stream(self) -> bool:
        return is_stream(self.samples)


def _split(given: _Given, reading: Reading | None) -> Split:
    value, where, nested = given
    if isinstance(value, Split):
        return value
    dataset = Stream(given.samples, where, reading) if given.is_stream else given.samples
    if isinstance(value, DataLoader):
        return _of_loader(value, dataset, where, nested)
    if type(value) is TensorDataset and len(value.tensors) == 2:  # a subclass may draw within samples
        value = value.tensors
    if isinstance(value, tuple | list) and len(value) == 2:
        return make_split(value[0], value[1], where, ConfigError)
    if not given.is_stream and not _is_samples(value):
        raise ConfigError(f"{where}: found {_describe(value)}, expected a pair (inputs, targets) or a Dataset, as in {_EXPECTED}")
    return CollatedSplit(dataset, where) if nested else _pairs(dataset, where)


def _of_loader(loader: DataLoader[Any], dataset: Any, where: str, nested: bool) -> Split:
    workers = workers_of(loader, where)
    collated = nested or loader.collate_fn is not default_collate
    split = CollatedSplit(dataset, where, loader.collate_fn) if collated else _pairs(dataset, where)
    split.workers, split.batch_size = workers, loader.batch_size
    return split


def _pairs(dataset: Any, where: str) -> LazySplit:
    if not len(dataset):
        return LazySplit(dataset, where, None)
    sample = dataset[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ConfigError(f"{where}: sample 0 is {_describe(sample)}, expected a pair (input, target)")
    if any(isinstance(part, tuple | list | Mapping | str) for part in sample):
        return CollatedSplit(dataset, where)
    return LazySplit(dataset, where, _first_sample(sample, where))


def _is_samples(value: Any) -> bool:
    """Tell whether a value is a map-style Dataset; arrays and containers have its methods, too."""
    ordinary = isinstance(value, type | tuple | list | dict | str | bytes | Tensor | np.ndarray)
    return not ordinary and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _first_sample(sample: Sequence[Any], where: str) -> Batch:
    tensors = []
    for part, value in zip(("input", "target"), sample, strict=True):
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError) as error:
            found = _describe(value)
            raise ConfigError(f"{where}: the {part} of sample 0 is {found}, expected a tensor: {error}") from error
    return tensors[0], tensors[1]


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return f"{type(value).__name__}"
