"""The user's own data: a ready DataSet, a (train, test) of samples, or a factory that returns either."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, load_attribute
from mpisgd.config import CustomDataOptions
from mpisgd.data.dataset import Batch, DataSet, LazySplit, Split, make_dataset, make_split
from mpisgd.data.loader import CollatedSplit, workers_of

_EXPECTED = "(train, test), each a pair (inputs, targets) of tensors or arrays, or a Dataset with __len__ and __getitem__"


def load(options: CustomDataOptions, *, data_dir: str, seed: int, nested: bool = False) -> DataSet:
    """The data of `options.factory`, called with `options.kwargs`, and with data_dir and seed where it has such parameters.

    Raises ConfigError where it cannot be imported or called, or returns something else.
    """
    factory = load_attribute(options.factory, "data.factory")
    field = f"data.factory = {options.factory!r}"
    value = call_factory(factory, options.kwargs, {"data_dir": data_dir, "seed": seed}, field)
    return as_dataset(value, field, nested=nested)


def as_dataset(
    value: Any, name: str = "custom", offered: Mapping[str, Any] = MappingProxyType({}), *, nested: bool = False
) -> DataSet:
    """A DataSet as it is; (train, test) as a DataSet called `name`; or what a factory returns of these.

    The factory is given those of `offered` for which it has parameters. `nested`: samples of a Dataset need not be pairs, and are
    collated as torch does it, for an own step.

    The test split may be None or empty. Raises ConfigError, which names `name` and what was found.
    """
    if isinstance(value, DataSet):
        return value
    if callable(value) and not _is_samples(value):
        value = call_factory(value, {}, offered, name)
        if isinstance(value, DataSet):
            return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name}: found {_describe(value)}, expected {_EXPECTED}")
    train, test = value
    splits = (_split(train, f"{name}: train", nested), None if test is None else _split(test, f"{name}: test", nested))
    return make_dataset(name, *splits, ConfigError)


def _split(value: Any, where: str, nested: bool) -> Split:
    if isinstance(value, Split):
        return value
    if isinstance(value, DataLoader):
        return _of_loader(value, where, nested)
    if isinstance(value, IterableDataset):
        raise ConfigError(
            f"{where}: found a stream, {_describe(value)}, expected a map-style Dataset, with __len__ and __getitem__"
        )
    if type(value) is TensorDataset and len(value.tensors) == 2:  # a class of the user's own may draw within its samples
        value = value.tensors
    if isinstance(value, tuple | list) and len(value) == 2:
        return make_split(value[0], value[1], where, ConfigError)
    if not _is_samples(value):
        raise ConfigError(f"{where}: found {_describe(value)}, expected a pair (inputs, targets) or a Dataset, as in {_EXPECTED}")
    if nested:
        return CollatedSplit(value, where)
    return LazySplit(value, where, _first_sample(value[0], where) if len(value) else None)


def _of_loader(loader: DataLoader[Any], where: str, nested: bool) -> Split:
    """The samples of a DataLoader, with its collate function and workers."""
    workers, dataset = workers_of(loader, where), loader.dataset
    split: LazySplit
    if nested or loader.collate_fn is not default_collate:
        split = CollatedSplit(dataset, where, loader.collate_fn)
    else:
        split = LazySplit(dataset, where, _first_sample(dataset[0], where) if len(dataset) else None)  # type: ignore[arg-type]
    split.workers, split.batch_size = workers, loader.batch_size
    return split


def _is_samples(value: Any) -> bool:
    """Whether this is a map-style Dataset; arrays, tensors and plain containers have its methods but are none."""
    ordinary = isinstance(value, type | tuple | list | dict | str | bytes | Tensor | np.ndarray)
    return not ordinary and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _first_sample(sample: Any, where: str) -> Batch:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ConfigError(f"{where}: sample 0 is {_describe(sample)}, expected a pair (input, target)")
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
