"""The papers' networks, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    CustomModelOptions,
    MlpOptions,
    MnistCnnOptions,
    ModelOptions,
    SmallCnnOptions,
    SoftmaxOptions,
    kind_of,
)
from mpisgd.models import alexnet, cifar10_full, custom, mnist_cnn, small
from mpisgd.models.in_pieces import Needed

__all__ = ["from_factory", "make"]


def make(
    options: ModelOptions, *, input_shape: tuple[int, ...], classes: int | None, seed: int, needed: Needed | None = None
) -> nn.Module:
    """The network of `options`, with the same bits on every rank; the global generators are left as they were.

    `needed`: of a model in pieces, which of them this rank is to have (`in_pieces`).

    Raises ConfigError where the network is not cut for `input_shape`, the number of classes, which it needs, is not known (None),
    or the user's factory is not one.
    """
    with _seeded(seed):
        if isinstance(options, CustomModelOptions):
            return custom.make(options, input_shape, classes, seed, needed)
        if classes is None:
            raise custom.unknown_classes(f"model {kind_of(options)!r}")
        match options:
            case SoftmaxOptions():
                model = small.softmax(input_shape, classes)
            case MlpOptions():
                model = small.mlp(options, input_shape, classes)
            case SmallCnnOptions():
                model = small.small_cnn(options, input_shape, classes)
            case MnistCnnOptions():
                model = mnist_cnn.make(input_shape, classes)
            case Cifar10FullOptions():
                model = cifar10_full.make(input_shape, classes)
            case AlexNetOptions():
                model = alexnet.make(input_shape, classes)
    return model


def from_factory(
    factory: Callable[..., nn.Module],
    *,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    needed: Needed | None = None,
) -> nn.Module:
    """`make`, of the factory that a user of the Python API hands over."""
    with _seeded(seed):
        return custom.build(factory, {}, input_shape=input_shape, classes=classes, seed=seed, field="model", needed=needed)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from the global generators as seeded by `seed`, of torch by itself, and restore their states after."""
    with seeded(seeds_of(Domain.MODEL, seed)._replace(torch=seed)):
        yield
