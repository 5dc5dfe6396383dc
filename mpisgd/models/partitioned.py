"""A model with each layer split over a group's ranks (`partition.py`).

One factory makes each piece by its place and draws, as in `in_pieces.py`. A process has the whole; or one piece, and the others'
names and shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, takes
from mpisgd.models.in_pieces import Needed, Pieces, drawing
from mpisgd.models.interleaved import Interleaved
from mpisgd.models.partition import Partition


class Partitioned(Pieces):
    """Pieces of the same layers; a call runs all pieces and returns piece 0's result."""

    partitions: tuple[Partition, ...]

    def complete(self) -> None:
        for place in range(len(self)):
            self[place] = self.make(place)

    def forward(self, inputs: Any) -> Any:
        return Interleaved(self.partitions).run([functools.partial(piece, inputs) for piece in self])[0]


def build(
    factory: Any, kwargs: dict[str, Any], offered: dict[str, Any], seed: int, field: str, places: int, needed: Needed | None = None
) -> Partitioned:
    """Return `places` pieces; only the `needed` have values."""
    if not takes(factory, "partition"):
        raise ConfigError(f"group_form = 'partition': expected a factory with a parameter `partition`, {field} has none")
    model = Partitioned()
    model.partitions = partitions = tuple(Partition(place, places) for place in range(places))

    def make(place: int) -> nn.Module:
        name = _name(field, place, places)
        with drawing(seed, place):
            piece = call_factory(factory, kwargs, {**offered, "partition": partitions[place]}, name)
        if not isinstance(piece, nn.Module):
            raise ConfigError(f"{name} is {type(piece).__name__}, expected a torch.nn.Module")
        return piece

    model.make = make
    found = WeakIdKeyDictionary()
    for place in range(places):
        piece = make(place) if needed is None else _without_values(make, place)
        _check(piece, _name(field, place, places), place, found)
        model.append(piece if needed is None else piece.to("meta"))
    chosen: Container[int] = () if needed is None else needed(model)
    for place in range(places):
        if place in chosen:
            model[place] = make(place)
    return model


def _name(field: str, place: int, places: int) -> str:
    return f"{field}: piece {place} of {places}"


def _without_values(make: Callable[[int], nn.Module], place: int) -> nn.Module:
    """Return a piece on meta; with values where its factory needs them."""
    try:
        with torch.device("meta"):
            return make(place)
    except (RuntimeError, TypeError, ValueError):
        return make(place)


def _check(piece: nn.Module, name: str, place: int, found: Any) -> None:
    """Raise ConfigError for a piece without trainable parameters, or with another piece's."""
    if not any(parameter.requires_grad for parameter in piece.parameters()):
        raise ConfigError(f"{name} has no parameters to train, expected some, for the shards of this piece")
    for own, parameter in piece.named_parameters():
        if (other := found.setdefault(parameter, place)) != place:
            raise ConfigError(
                f"{name}: parameter {own} is in piece {other}, too: expected each parameter in one piece, on one"
                " rank; a value for all pieces comes from one piece by partition.sum or gather"
            )
