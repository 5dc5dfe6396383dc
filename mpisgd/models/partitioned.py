"""A model of which each rank of a group has a piece that is at work with all others on the same layer (`partition.py`).

Here it is whole, in one process: its pieces are made by one factory, each for its place, and each from draws of its own, as those
of a list of factories are (`in_pieces.py`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, takes
from mpisgd.base.streams import Domain
from mpisgd.models.partition import Partition
from mpisgd.models.together import Together


class Partitioned(nn.Sequential):
    """The pieces, in the order of places; called, it computes all of them, and returns what piece 0 does.

    Attributes:
        partitions: what each piece was handed.
    """

    partitions: tuple[Partition, ...]

    def forward(self, inputs: Any) -> Any:
        return Together(self.partitions).run([functools.partial(piece, inputs) for piece in self])[0]


def build(factory: Any, kwargs: dict[str, Any], offered: dict[str, Any], seed: int, field: str, places: int) -> Partitioned:
    """Make so many pieces. `offered` and `field` are as in `call_factory`. Raises ConfigError."""
    if not takes(factory, "partition"):
        raise ConfigError(f"group_form = 'partition': expected a factory with a parameter `partition`, {field} has none")
    model, found = Partitioned(), dict[nn.Parameter, int]()
    model.partitions = tuple(Partition(place, places) for place in range(places))
    for place, partition in enumerate(model.partitions):
        name = f"{field}: piece {place} of {places}"
        with seeded(seeds_of(Domain.MODEL, seed, 0, 0, 1 + place)):
            piece = call_factory(factory, kwargs, {**offered, "partition": partition}, name)
        if not isinstance(piece, nn.Module):
            raise ConfigError(f"{name} is {type(piece).__name__}, expected a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in piece.parameters()):
            raise ConfigError(f"{name} has no parameters to train, expected some, which it has on shards of its own")
        for own, parameter in piece.named_parameters():
            if (other := found.setdefault(parameter, place)) != place:
                raise ConfigError(
                    f"{name}: its parameter {own} is one of piece {other}, too: expected each in one piece, for it lies on one"
                    " rank; what all need, one of them gives to the others by partition.sum or gather"
                )
        model.append(piece)
    return model
