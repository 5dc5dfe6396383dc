"""A model in pieces: a list of factories, so that a rank makes only the pieces it needs.

A piece draws by (seed, place): the same bits on any rank. Other pieces have names and shapes alone, on torch's device "meta".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory
from mpisgd.base.streams import Domain

Needed = Callable[[nn.Sequential], Container[int]]
"""Map from the model on meta to the pieces that a rank needs."""


class Pieces(nn.Sequential):
    """The pieces in order, with values or on meta; `make` returns a fresh piece."""

    make: Callable[[int], nn.Module]

    @property
    def whole(self) -> bool:
        return not any(parameter.is_meta for parameter in self.parameters())


class InPieces(Pieces):
    """Layers after layers."""

    def skeleton(self) -> nn.Sequential:
        return _on_meta(self.make, len(self))


def drawing(seed: int, place: int) -> AbstractContextManager[None]:
    """Seed a piece's draws by names alone (law 5)."""
    return seeded(seeds_of(Domain.MODEL, seed, 0, 0, 1 + place))


def are_factories(made: Any) -> bool:
    callables = isinstance(made, list | tuple) and all(callable(each) for each in made)
    return callables and len(made) > 0 and not any(isinstance(each, nn.Module) for each in made)


def build(factories: Sequence[Any], offered: dict[str, Any], seed: int, field: str, needed: Needed | None) -> InPieces:
    """Return the pieces; only the `needed` have values."""

    def make(place: int) -> nn.Module:
        name = f"{field}: factory {place} of the list"
        with drawing(seed, place):
            piece = call_factory(factories[place], {}, offered, name)
        if not isinstance(piece, nn.Module):
            raise ConfigError(f"{name} returned {type(piece).__name__}, expected a torch.nn.Module")
        return piece

    model, count = InPieces(), len(factories)
    model.make = make
    skeleton = None if needed is None else _on_meta(make, count)
    chosen: Container[int] = range(count) if needed is None or skeleton is None else needed(skeleton)
    for place in range(count):
        model.append(make(place) if skeleton is None or place in chosen else skeleton[place])
    return model


def _on_meta(make: Callable[[int], nn.Module], count: int) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(make(place).to("meta") for place in range(count)))
