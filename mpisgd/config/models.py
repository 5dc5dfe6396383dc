"""Choices of the network: one frozen dataclass per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpisgd.base.checks import require


@dataclass(frozen=True)
class SoftmaxOptions:
    """Softmax regression: one fully connected layer."""


@dataclass(frozen=True)
class MlpOptions:
    """Multi-layer perceptron with ReLU."""

    hidden: tuple[int, ...] = (128,)
    """Units of each hidden layer."""
    batch_norm: bool = False
    """Add batch normalisation after each hidden layer."""

    def __post_init__(self) -> None:
        require(all(units >= 1 for units in self.hidden), "model.hidden", self.hidden, "positive numbers of units")


@dataclass(frozen=True)
class SmallCnnOptions:
    """Two 3x3 convolutions and one fully connected layer, for tiny images such as the 8x8 digits."""

    channels: tuple[int, int] = (16, 32)
    """Output channels of the two convolutions."""

    def __post_init__(self) -> None:
        require(all(channels >= 1 for channels in self.channels), "model.channels", self.channels, "positive numbers")


@dataclass(frozen=True)
class MnistCnnOptions:
    """The 4-layer 3x3 CNN with weight normalisation of [Chen16 A.1]."""


@dataclass(frozen=True)
class Cifar10FullOptions:
    """Caffe's cifar10_full: 5x5 convolutions of 32, 32, 64 and one fully connected layer, 89,578 parameters [Zhang16 4.1]."""


@dataclass(frozen=True)
class AlexNetOptions:
    """AlexNet for inputs of the ImageNet shape, near the 72 M parameters (289 MB) of [Zhang16 4.1]."""


@dataclass(frozen=True)
class CustomModelOptions:
    """The user's own model, from a factory."""

    factory: str = ""
    """package.module:factory, a callable that returns a torch.nn.Module, or a list of modules that follow each other."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


ModelOptions = (
    SoftmaxOptions | MlpOptions | SmallCnnOptions | MnistCnnOptions | Cifar10FullOptions | AlexNetOptions | CustomModelOptions
)
MODELS: Mapping[str, type] = {
    "softmax": SoftmaxOptions,
    "mlp": MlpOptions,
    "small_cnn": SmallCnnOptions,
    "mnist_cnn": MnistCnnOptions,
    "cifar10_full": Cifar10FullOptions,
    "alexnet": AlexNetOptions,
    "custom": CustomModelOptions,
}
