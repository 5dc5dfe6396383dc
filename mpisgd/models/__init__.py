"""The papers' networks, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    CustomModelOptions,
    LocalOptions,
    MlpOptions,
    MnistCnnOptions,
    ModelOptions,
    SmallCnnOptions,
    SoftmaxOptions,
    SpeechOptions,
    kind_of,
)
from mpisgd.models import alexnet, cifar10_full, custom, local, mnist_cnn, small, speech
from mpisgd.models.in_pieces import Needed

__all__ = ["from_factory", "make"]

#: Networks split within layers, and the makers of their pieces.
PARTITIONED: Mapping[type, Callable[..., nn.Module]] = {SpeechOptions: speech.make, LocalOptions: local.make}


def make(
    options: ModelOptions,
    *,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    needed: Needed | None = None,
    places: int = 1,
) -> nn.Module:
    """Return the network of `options`, with the same bits on every rank; restore the global generators.

    `needed`: pieces that this rank needs of a model in pieces. `places`: ranks per layer; above 1, the model is `Partitioned`.
    """
    with _seeded(seed):
        if isinstance(options, CustomModelOptions):
            return custom.make(options, input_shape, classes, seed, needed, places)
        if classes is None:
            raise custom.unknown_classes(f"model {kind_of(options)!r}")
        if type(options) in PARTITIONED or places > 1:
            return _in_pieces(options, input_shape, classes, seed, needed, places)
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
                model = cifar10_full.make(options, input_shape, classes)
            case AlexNetOptions():
                model = alexnet.make(input_shape, classes)
    return model


def _in_pieces(
    options: ModelOptions, input_shape: tuple[int, ...], classes: int, seed: int, needed: Needed | None, places: int
) -> nn.Module:
    kind, name = PARTITIONED.get(type(options)), kind_of(options)
    if kind is None:
        able = " or ".join(repr(kind_of(each())) for each in PARTITIONED)
        raise ConfigError(f"group_form = 'partition': model {name!r} has no pieces, expected {able}, or a factory of your own")
    offered = {"options": options, "input_shape": input_shape, "classes": classes}
    model: nn.Module = custom.build_pieces(kind, {}, offered, seed, f"model = {name!r}", places, needed)
    return model


def from_factory(
    factory: Callable[..., nn.Module],
    *,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    needed: Needed | None = None,
    places: int = 1,
) -> nn.Module:
    """Return a model as `make`, from a Python user's factory."""
    with _seeded(seed):
        own: dict[str, Any] = {"input_shape": input_shape, "classes": classes, "seed": seed, "needed": needed, "places": places}
        return custom.build(factory, {}, field="model", **own)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with seeded(seeds_of(Domain.MODEL, seed)._replace(torch=seed)):
        yield
