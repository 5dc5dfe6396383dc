"""Choices of the data set: one frozen dataclass per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from mpisgd.base.checks import at_least, require


class Part(IntEnum):
    """Samples that weights are evaluated on; the numbers are those of the log."""

    TEST = 0
    TRAINING = 1
    VALIDATION = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """Samples that any data may set aside."""

    validation: int = 0
    """Training samples that are set aside, drawn by the seed: nothing trains on them, they are evaluated beside the test data."""

    def __post_init__(self) -> None:
        at_least(self, "data.", validation=0)


@dataclass(frozen=True)
class DigitsOptions(SetAside):
    """The 1,797 real 8x8 handwritten digits that scikit-learn carries; needs no files."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class MnistOptions(SetAside):
    """MNIST in its authors' four IDX files (plain or .gz), below <data-dir>/mnist."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""
    scale: Literal[1, 255] = 255
    """Divide pixels of 0 to 255 by this number."""


@dataclass(frozen=True)
class FashionMnistOptions(SetAside):
    """Fashion-MNIST in its authors' four IDX files (plain or .gz), below <data-dir>/fashion_mnist."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""
    scale: Literal[1, 255] = 255
    """Divide pixels of 0 to 255 by this number."""


@dataclass(frozen=True)
class Cifar10Options(SetAside):
    """CIFAR-10 in its binary batches, below <data-dir>/cifar10 (folder or tar.gz)."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""
    scale: Literal[1, 255] = 255
    """Divide pixels of 0 to 255 by this number."""


@dataclass(frozen=True)
class Hdf5Options(SetAside):
    """Any HDF5 file with inputs and targets; samples are read when they are drawn."""

    path: str = ""
    """Path of the file. Relative paths are looked for below <data-dir>, too."""
    train_inputs: str = "train/inputs"
    """Data set of the training inputs, first axis = sample."""
    train_targets: str = "train/targets"
    """Data set of the training targets, one integer class (or float vector) per sample."""
    test_inputs: str = "test/inputs"
    """Data set of the test inputs."""
    test_targets: str = "test/targets"
    """Data set of the test targets."""
    subtract_mean: bool = False
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]. Each rank reads all of them for it, once, at the start."""
    classes: int = 0
    """Number of classes; 0 = largest target + 1. To find that, targets of up to 256 MiB are read at the start; of more, nobody
    knows it unless it is told."""
    cache_nbytes: int = 2**26
    """Uncompressed chunks that a rank keeps, of each data set of the file, in bytes. One chunk at least. Matters where data sets
    are chunked: a chunk that is not kept is read, and decompressed, again for a sample of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "data.", classes=0, cache_nbytes=0)


@dataclass(frozen=True)
class SyntheticOptions(SetAside):
    """Random inputs of a given shape with learnable classes, for timing and tests; a function of the seed."""

    shape: tuple[int, ...] = (3, 32, 32)
    """Shape of one input."""
    classes: int = 10
    """Number of classes."""
    samples: int = 4096
    """Training samples."""
    test_samples: int = 512
    """Test samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "data.", classes=2, samples=1, test_samples=0)
        require(all(size >= 1 for size in self.shape), "data.shape", self.shape, "positive sizes")


@dataclass(frozen=True)
class CustomDataOptions(SetAside):
    """The user's own data, from a factory."""

    factory: str = ""
    """package.module:factory, a callable that returns (train, test)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


DataOptions = (
    DigitsOptions | MnistOptions | FashionMnistOptions | Cifar10Options | Hdf5Options | SyntheticOptions | CustomDataOptions
)
DATA: Mapping[str, type] = {
    "digits": DigitsOptions,
    "mnist": MnistOptions,
    "fashion_mnist": FashionMnistOptions,
    "cifar10": Cifar10Options,
    "hdf5": Hdf5Options,
    "synthetic": SyntheticOptions,
    "custom": CustomDataOptions,
}
