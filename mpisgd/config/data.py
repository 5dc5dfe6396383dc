"""Options of the data set: a frozen dataclass per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from mpisgd.base.checks import at_least, require


class Part(IntEnum):
    """Samples for evaluation, numbered as in the log."""

    TEST = 0
    TRAINING = 1
    VALIDATION = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """Options of every data set."""

    validation: int = 0
    """Training samples set aside, drawn by the seed: evaluated beside the test data, never trained on."""

    def __post_init__(self) -> None:
        at_least(self, "data.", validation=0)


@dataclass(frozen=True)
class DigitsOptions(SetAside):
    """scikit-learn's 1,797 real 8x8 handwritten digits; needs no files."""

    subtract_mean: bool = True
    """Subtract the training inputs' per-pixel mean [Zhang16 4.1]."""


@dataclass(frozen=True)
class Pixels(SetAside):
    """Options of image files."""

    subtract_mean: bool = True
    """Subtract the training inputs' per-pixel mean [Zhang16 4.1]."""
    scale: Literal[1, 255] = 255
    """Divide pixels (0 to 255) by this."""


@dataclass(frozen=True)
class MnistOptions(Pixels):
    """MNIST in its four IDX files (plain or .gz), below <data-dir>/mnist."""


@dataclass(frozen=True)
class FashionMnistOptions(Pixels):
    """Fashion-MNIST in its four IDX files (plain or .gz), below <data-dir>/fashion_mnist."""


@dataclass(frozen=True)
class Cifar10Options(Pixels):
    """CIFAR-10 in binary batches, below <data-dir>/cifar10 (folder or tar.gz)."""


@dataclass(frozen=True)
class Hdf5Options(SetAside):
    """Any HDF5 file of inputs and targets; samples are read when drawn."""

    path: str = ""
    """Path of the file; relative paths are also sought below <data-dir>."""
    train_inputs: str = "train/inputs"
    """Data set of training inputs, first axis = sample."""
    train_targets: str = "train/targets"
    """Data set of training targets, an integer class (or float vector) per sample."""
    test_inputs: str = "test/inputs"
    """Data set of test inputs."""
    test_targets: str = "test/targets"
    """Data set of test targets."""
    subtract_mean: bool = False
    """Subtract the training inputs' per-pixel mean [Zhang16 4.1]. Each rank reads all inputs at the start."""
    classes: int = 0
    """Number of classes; 0 = largest target + 1. Found at the start in targets of up to 256 MiB; to be given for more."""
    cache_nbytes: int = 2**26
    """Bytes of uncompressed chunks kept per rank and data set, at least a chunk. For chunked data sets: other chunks are read and
    decompressed for each sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "data.", classes=0, cache_nbytes=0)


@dataclass(frozen=True)
class SyntheticOptions(SetAside):
    """Random inputs with learnable classes, for timing and tests; a function of the seed."""

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
    """The user's own data."""

    factory: str = ""
    """package.module:factory, returning (train, test)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The factory's keyword arguments."""


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
