"""The papers' networks, and the user's own (DESIGN 3, floor 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    CustomModelOptions,
    MlpOptions,
    MnistCnnOptions,
    ModelOptions,
    SmallCnnOptions,
    SoftmaxOptions,
)
from mpisgd.models import alexnet, cifar10_full, custom, mlp, mnist_cnn, small_cnn, softmax

__all__ = ["from_factory", "make", "parameter_count"]


def make(options: ModelOptions, *, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The network of `options`, with the same bits on every rank; torch's random state is left as it was.

    Raises ConfigError where the network is not cut for `input_shape`, or the user's factory is not one.
    """
    with _seeded(seed):
        match options:
            case SoftmaxOptions():
                model = softmax.make(input_shape, classes)
            case MlpOptions():
                model = mlp.make(options, input_shape, classes)
            case SmallCnnOptions():
                model = small_cnn.make(options, input_shape, classes)
            case MnistCnnOptions():
                model = mnist_cnn.make(input_shape, classes)
            case Cifar10FullOptions():
                model = cifar10_full.make(input_shape, classes)
            case AlexNetOptions():
                model = alexnet.make(input_shape, classes)
            case CustomModelOptions():
                model = custom.make(options, input_shape, classes, seed)
    return model


def from_factory(factory: Callable[..., nn.Module], *, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """`make`, of the factory that a user of the Python API hands over."""
    with _seeded(seed):
        return custom.build(factory, {}, input_shape=input_shape, classes=classes, seed=seed, field="model")


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters; the length of the flat vector."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from torch's generators as seeded by `seed`, and restore their states after."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
