"""Options of the network: a frozen dataclass per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd.base.checks import require


@dataclass(frozen=True)
class SoftmaxOptions:
    """Softmax regression: a fully connected layer."""


@dataclass(frozen=True)
class MlpOptions:
    """Multi-layer perceptron with ReLU."""

    hidden: tuple[int, ...] = (128,)
    """Units per hidden layer."""
    batch_norm: bool = False
    """Add batch normalisation after each hidden layer."""

    def __post_init__(self) -> None:
        require(all(units >= 1 for units in self.hidden), "model.hidden", self.hidden, "positive numbers of units")


@dataclass(frozen=True)
class SmallCnnOptions:
    """Two 3x3 convolutions and a fully connected layer, for tiny images like 8x8 digits."""

    channels: tuple[int, int] = (16, 32)
    """Output channels per convolution."""

    def __post_init__(self) -> None:
        require(all(channels >= 1 for channels in self.channels), "model.channels", self.channels, "positive numbers")


@dataclass(frozen=True)
class MnistCnnOptions:
    """The 4-layer 3x3 CNN with weight normalisation of [Chen16 A.1]."""


@dataclass(frozen=True)
class Cifar10FullOptions:
    """Caffe's cifar10_full: 5x5 convolutions of 32, 32, 64 and a fully connected layer, 89,578 parameters [Zhang16 4.1]."""

    form: Literal["plain", "caffe"] = "plain"
    """plain: torch's first weights. caffe: Caffe's, and its response normalisation, for pixels of 0 to 255."""


@dataclass(frozen=True)
class AlexNetOptions:
    """AlexNet for inputs of the ImageNet shape, near the 72 M parameters (289 MB) of [Zhang16 4.1]."""


@dataclass(frozen=True)
class SpeechOptions:
    """Fully connected sigmoid layers, the acoustic model of [Dean12 5]: 42 M parameters for 440 inputs and 8,192 classes."""

    hidden: tuple[int, ...] = (2560, 2560, 2560, 2560)
    """Units per hidden layer, shared by a partition's ranks."""

    def __post_init__(self) -> None:
        require(all(units >= 1 for units in self.hidden), "model.hidden", self.hidden, "positive numbers of units")


@dataclass(frozen=True)
class LocalOptions:
    """Locally connected images, after [Dean12 5]: convolutions with separate weights at each place."""

    channels: tuple[int, ...] = (8, 8)
    """Output channels per layer; rows and columns stay."""
    field: int = 3
    """Rows and columns each place is connected to, odd. A partition's ranks share the columns."""

    def __post_init__(self) -> None:
        require(
            len(self.channels) > 0 and all(each >= 1 for each in self.channels), "model.channels", self.channels, "positive numbers"
        )
        require(self.field >= 1 and self.field % 2 == 1, "model.field", self.field, "an odd number >= 1")


@dataclass(frozen=True)
class CustomModelOptions:
    """The user's own model."""

    factory: str = ""
    """package.module:factory, returning a torch.nn.Module, or a list of consecutive modules."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The factory's keyword arguments."""


ModelOptions = (
    SoftmaxOptions
    | MlpOptions
    | SmallCnnOptions
    | MnistCnnOptions
    | Cifar10FullOptions
    | AlexNetOptions
    | SpeechOptions
    | LocalOptions
    | CustomModelOptions
)
MODELS: Mapping[str, type] = {
    "softmax": SoftmaxOptions,
    "mlp": MlpOptions,
    "small_cnn": SmallCnnOptions,
    "mnist_cnn": MnistCnnOptions,
    "cifar10_full": Cifar10FullOptions,
    "alexnet": AlexNetOptions,
    "speech": SpeechOptions,
    "local": LocalOptions,
    "custom": CustomModelOptions,
}
