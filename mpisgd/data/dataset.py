"""A data set: a training and a test split, in memory or fetched, for mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Subset

from mpisgd.base.draws import Seeds, seeded
from mpisgd.base.errors import ConfigError, DataError, MpisgdError
from mpisgd.base.streams import Domain, stream
from mpisgd.config import Part
from mpisgd.data.stream import Stream

Batch = tuple[Tensor, Tensor]

IGNORED = -100
"""Class ignored by torch's losses."""
ON_GPU_NBYTES = 2**31
"""Larger data stay on the host."""
_MEAN_CHUNK = 250  # samples summed at a time


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Samples in memory.

    Images stay uint8 (a quarter of the bytes; a mapped file's pages are shared by a node's ranks), and become float32 per
    mini-batch: input / scale - mean.
    """

    inputs: Tensor
    """(n, *shape), of any numbers; float32 when scaled or centred."""
    targets: Tensor
    """(n,) int64 classes; or int64 or float32 (n, ...)."""
    scale: float | None = None
    """Divisor of inputs."""
    mean: Tensor | None = None
    """(*shape) float32, subtracted after division [Zhang16 4.1]."""
    chosen: npt.NDArray[np.int64] | None = None
    """Numbers of own samples; None = all."""

    def __len__(self) -> int:
        return len(self.inputs if self.chosen is None else self.chosen)

    def part(self, chosen: npt.NDArray[np.int64]) -> Split:
        return replace(self, chosen=chosen if self.chosen is None else self.chosen[chosen])

    def on(self, device: torch.device) -> Split:
        """Return the split on a GPU, unless too large."""
        if device.type == "cpu" or self.inputs.nbytes > ON_GPU_NBYTES:
            return self
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return replace(self, inputs=inputs, targets=targets, mean=None if self.mean is None else self.mean.to(device))

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Return new inputs (len(indices), *shape), and targets."""
        chosen = torch.from_numpy(indices if self.chosen is None else self.chosen[indices]).to(self.inputs.device)
        inputs = self.inputs.index_select(0, chosen)
        if self.scale is not None or self.mean is not None:
            inputs = inputs.to(torch.float32)
        if self.scale is not None:
            inputs = inputs.div_(self.scale)
        if self.mean is not None:
            inputs = inputs.sub_(self.mean)
        return inputs, self.targets.index_select(0, chosen)

    @property
    def padded(self) -> bool:
        """Inputs may differ in shape until batched."""
        return False

    @property
    def in_order(self) -> bool:
        """Samples can only be read in order."""
        return False

    @property
    def loaded_in(self) -> int | None:
        """Batch size of a user's DataLoader, kept by evaluations; None = not given."""
        return None

    def forget(self) -> None:
        """Make the next reader of a stream begin anew."""

    @property
    def advice(self) -> str:
        """Advice before a slow run."""
        return ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    @cached_property
    def classes(self) -> int | None:
        """Largest class + 1; the number of outputs for float targets; None if only reading all samples could tell."""
        return _outputs(self.targets)


class LazySplit(Split):
    """Samples of a torch map-style Dataset, `dataset[i] -> (input, target)`, or of a stream, stacked per mini-batch.

    Args:
        where: name in messages.
        first: sample that tells shapes and types.

    Attributes:
        workers: `loader.Workers`, on real ranks.
        batch_size: a DataLoader's.
    """

    def __init__(self, dataset: Any, where: str, first: Batch | None) -> None:
        self.workers: Any = None
        self.batch_size: int | None = None
        self.dataset = dataset
        self.where = where
        self.first = first

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def part(self, chosen: npt.NDArray[np.int64]) -> LazySplit:
        if self.in_order:
            raise ConfigError(f"data.validation: {self.where} is a stream, and nobody can choose samples of a stream: expected 0")
        part = copy(self)
        part.dataset = Subset(self.dataset, chosen.tolist())
        part.__dict__["classes"] = self.classes
        return part

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Return inputs and targets; `fetch` seeds their draws. Raises DataError: shapes differ."""
        pairs = [self.dataset[index] for index in indices.tolist()]
        inputs, targets = (self._stacked([torch.as_tensor(pair[part]) for pair in pairs], part, indices) for part in (0, 1))
        return as_given(inputs), as_targets(targets)

    def _stacked(self, values: list[Tensor], part: int, indices: npt.NDArray[np.int64]) -> Tensor:
        for index, value in zip(indices.tolist(), values, strict=True):
            if value.shape != values[0].shape:
                what = f"{('inputs', 'targets')[part]} of shapes {tuple(values[0].shape)} and {tuple(value.shape)}"
                raise DataError(f"{self.where}: samples {indices[0]} and {index} have {what}, expected one shape")
        return torch.stack(values)

    @property
    def in_order(self) -> bool:
        return isinstance(self.dataset, Stream)

    @property
    def loaded_in(self) -> int | None:
        """Size 1, the DataLoader's default, counts only with a collate function."""
        return self.batch_size if self.padded or (self.batch_size or 1) > 1 else None

    def forget(self) -> None:
        if isinstance(self.dataset, Stream):
            self.dataset.forget()

    @property
    def input_shape(self) -> tuple[int, ...]:
        return () if self.first is None else tuple(self.first[0].shape)

    @cached_property
    def classes(self) -> int | None:
        """The Dataset's `classes` (a number, or names), or largest of `targets` + 1; the number of outputs for float targets."""
        told = getattr(self.dataset, "classes", None)
        if told is not None:
            return told if isinstance(told, int) else len(told)
        if self.first is not None and self.first[1].is_floating_point():
            return _outputs(self.first[1].unsqueeze(0))
        try:
            return _outputs(as_targets(torch.as_tensor(self.dataset.targets)))
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no targets, or no numbers
            return None


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training and a test split; `validation`: training samples set aside."""

    name: str
    train: Split
    test: Split
    validation: Split | None = None

    def part(self, part: Part) -> Split:
        split = {Part.TEST: self.test, Part.TRAINING: self.train, Part.VALIDATION: self.validation}[part]
        if split is None:
            raise DataError(f"{self.name}: no samples were set aside")
        return split

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.input_shape

    @property
    def classes(self) -> int | None:
        """Number of classes or, for float targets, outputs."""
        if self.train.classes is None:
            return None
        return max(self.train.classes, (self.test.classes or 0) if len(self.test) else 0)


def fetch(split: Split, indices: npt.NDArray[np.int64], seeds: Callable[[], Seeds]) -> Any:
    """Return `split.batch(indices)`, with all draws of user code seeded."""
    if type(split) is Split:  # tensors in memory: no draws
        return split.batch(indices)
    with seeded(seeds()):
        return split.batch(indices)


def fetch_each(split: Split, indices: Sequence[npt.NDArray[np.int64]], seeds: Callable[[int], Seeds]) -> Batch:
    """Return several mini-batches joined, each as by `fetch`."""
    if type(split) is Split:
        return split.batch(np.concatenate(indices))
    drawn = [fetch(split, each, lambda at=at: seeds(at)) for at, each in enumerate(indices)]  # type: ignore[misc]
    return torch.cat([inputs for inputs, _ in drawn]), torch.cat([targets for _, targets in drawn])


def make_split(inputs: Any, targets: Any, where: str, error: type[MpisgdError]) -> Split:
    """Return a split of tensors or arrays: floats become float32, other targets int64. Raises `error`, naming `where`."""
    tensors = []
    for part, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor | np.ndarray):
            raise error(f"{where}: {part} are a {type(value).__name__}, expected a tensor or a numpy array")
        tensor = torch.from_numpy(ordinary(value, f"{where}: {part}", error)) if isinstance(value, np.ndarray) else value
        if tensor.ndim < 1 or tensor.is_complex():
            raise error(f"{where}: {part} are {tensor.dtype} {tuple(tensor.shape)}, expected real numbers (samples, ...)")
        tensors.append(tensor.detach().cpu())
    if len(tensors[0]) != len(tensors[1]):
        raise error(f"{where}: {len(tensors[0])} inputs but {len(tensors[1])} targets, expected one target per input")
    split = Split(as_given(tensors[0]), as_targets(tensors[1]))
    if split.targets.dtype == torch.int64 and split.targets.ndim == 1:
        counting = split.targets[split.targets != IGNORED]
        least = int(counting.min()) if len(counting) else 0
        if least < 0:
            raise error(f"{where}: a target is {least}, expected classes from 0, or {IGNORED} for a target ignored by the loss")
    return split


def make_dataset(name: str, train: Split, test: Split | None, error: type[MpisgdError], *, subtract: bool = False) -> DataSet:
    """Return the data set; `subtract`: the training inputs' mean per pixel, of tensors, from both splits [Zhang16 4.1]."""
    if len(train) == 0:
        raise error(f"{name}: 0 training samples, expected at least 1")
    if subtract:
        mean = mean_of(train.inputs.numpy(), train.scale or 1.0)
        train, test = replace(train, mean=mean), None if test is None else replace(test, mean=mean)
    if test is None or len(test) == 0:
        return DataSet(name, train, empty_like(train))
    if test.input_shape != train.input_shape and not train.padded:
        raise error(f"{name}: test inputs have shape {test.input_shape}, expected {train.input_shape} as in training")
    return DataSet(name, train, test)


def empty_like(split: Split) -> Split:
    return Split(torch.zeros((0, *split.input_shape)), torch.zeros(0, dtype=torch.int64))


def set_aside(data: DataSet, samples: int, seed: int) -> DataSet:
    """Move `samples` training samples, drawn by the seed, to validation."""
    size = len(data.train)
    if samples >= size:
        raise ConfigError(f"data.validation = {samples}: expected fewer than the {size} training samples of {data.name}")
    order = stream(Domain.ASIDE, seed).permutation(size)
    validation, train = (data.train.part(np.sort(some)) for some in (order[:samples], order[samples:]))
    return replace(data, train=train, validation=validation)


def mean_of(inputs: Any, scale: float = 1.0) -> Tensor:
    """Return the mean of inputs / scale over samples; `inputs`, (n, *shape), are read in blocks.

    Sums are in integers, or in float64: every rank gets the same bits.
    """
    total: npt.NDArray[Any] | None = None
    for start in range(0, len(inputs), _MEAN_CHUNK):
        some = inputs[start : start + _MEAN_CHUNK]
        part = some.reshape(len(some), -1).sum(axis=0, dtype=np.int64 if some.dtype.kind in "iu" else np.float64)
        total = part if total is None else total + part
    assert total is not None
    return torch.from_numpy((total / len(inputs) / scale).astype(np.float32)).reshape(inputs.shape[1:])


def ordinary(array: npt.NDArray[Any], what: str, error: type[MpisgdError]) -> npt.NDArray[Any]:
    """Return the array in a type and byte order that torch takes."""
    if array.dtype.kind not in "biuf":
        raise error(f"{what} are of type {array.dtype}, expected numbers")
    array = np.ascontiguousarray(array) if array.ndim else array
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    return array if array.dtype == np.uint8 else array.astype(np.int64, copy=False)


def as_given(inputs: Tensor) -> Tensor:
    return inputs.to(torch.float32) if inputs.is_floating_point() else inputs


def as_inputs(inputs: Tensor) -> Tensor:
    is_real = inputs.is_floating_point() or inputs.dtype == torch.uint8
    return inputs.to(torch.float32 if is_real else torch.int64)


def as_targets(targets: Tensor) -> Tensor:
    return targets.to(torch.float32 if targets.is_floating_point() else torch.int64)


def _outputs(targets: Tensor) -> int:
    if targets.is_floating_point():
        return targets.shape[1] if targets.ndim > 1 else 1
    return int(targets.max()) + 1 if targets.numel() else 0
