"""Where a model is cut into stages, each held by one rank of a group, and which shards own the parameters of each [Dean12 3].

A stage is a run of children of a `torch.nn.Sequential`, and so, as modules are listed in the order of the flat vector, a piece of
that vector. Children without parameters stay with those before them, and children that have weights in common with each other.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.flat import Layer, bounds_of, cut_between, slice_bounds

Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    Attributes:
        children: of the model, those of each stage.
        bounds: of the flat vector, the piece of each stage.
        shards: those of each stage.
    """

    children: tuple[range, ...]
    bounds: Bounds
    shards: tuple[range, ...]

    def of_shard(self, shard: int) -> int:
        """The stage whose parameters a shard owns."""
        return next(stage for stage, shards in enumerate(self.shards) if shard in shards)

    @property
    def listed(self) -> list[list[int]]:
        """The shards of each stage."""
        return [list(shards) for shards in self.shards]

    @property
    def slices(self) -> Bounds:
        """The slice of each shard: those of a stage cut its piece of the vector evenly."""
        found = []
        for (start, end), shards in zip(self.bounds, self.shards, strict=True):
            found += [(start + begin, start + stop) for begin, stop in slice_bounds(end - start, len(shards))]
        return found

    def slices_of(self, stage: int) -> Bounds:
        """The slices of a stage's shards, in its own piece of the vector."""
        start, _ = self.bounds[stage]
        return [(begin - start, end - start) for begin, end in self.slices[self.shards[stage].start : self.shards[stage].stop]]

    def modules(self, model: nn.Module) -> list[nn.Sequential]:
        """The stages of a model, which share its modules."""
        children = list(model._modules.items())  # `named_children` leaves out one that is there twice
        return [nn.Sequential(OrderedDict[str, Any](children[own.start : own.stop])) for own in self.children]


def cut_into_stages(model: nn.Module, count: int, shards: int) -> Stages:
    """Cut a model into so many stages, of parameters as even as can be, and give each some of the shards, by its parameters.

    Raises ConfigError where the model is no Sequential, or has too few children with parameters of their own.
    """
    if type(model).forward is not nn.Sequential.forward:
        found, expected = type(model).__name__, "a torch.nn.Sequential, or a factory that returns a list of modules"
        raise ConfigError(f"group_size = {count}: the model is a {found}: expected {expected}, which can be cut into stages")
    layers, starts, unit = list[Layer](), list[int](), dict[nn.Parameter, int]()
    for at, (name, child) in enumerate(model._modules.items()):
        trained = {each for each in child.parameters() if each.requires_grad}  # type: ignore[union-attr]
        new = trained - unit.keys()
        size = sum(parameter.numel() for parameter in new)
        if tied := [
            unit[parameter] for parameter in trained & unit.keys()
        ]:  # all from the first that it has weights in common with
            first = min(tied)
            layers[first:] = [Layer(layers[first].name, size + sum(layer.size for layer in layers[first:]))]
            del starts[first + 1 :]
            unit = {parameter: min(own, first) for parameter, own in unit.items()}
        elif new:
            starts.append(at if layers else 0)
            layers.append(Layer(name, size))
        unit |= dict.fromkeys(new, len(layers) - 1)
    if len(layers) < count:
        raise ConfigError(
            f"group_size = {count}: expected at most the number of stages that the model can be cut into, {len(layers)}"
            " (children of its Sequential, or modules of its list, with trainable parameters of their own)"
        )
    dealt = cut_between(layers, count)
    firsts = [0, *itertools.accumulate(map(len, dealt))]
    edges = [starts[first] for first in firsts[:-1]] + [len(model._modules)]
    children = tuple(itertools.starmap(range, itertools.pairwise(edges)))
    bounds = bounds_of(dealt)
    return Stages(children, bounds, _deal(shards, [end - start for start, end in bounds]))


def cut_between_pieces(model: nn.Sequential, shards: int) -> Stages:
    """Of a model whose children are pieces that are at work at the same time: each rank of a group has one."""
    sizes = [sum(parameter.numel() for parameter in piece.parameters() if parameter.requires_grad) for piece in model]
    edges = itertools.accumulate(sizes, initial=0)
    return Stages(
        tuple(range(place, place + 1) for place in range(len(sizes))), list(itertools.pairwise(edges)), _deal(shards, sizes)
    )


def _deal(shards: int, sizes: list[int]) -> tuple[range, ...]:
    """One shard for each stage, and the others one by one where slices are largest."""
    counts = [1 for _ in sizes]
    for _ in range(shards - len(sizes)):
        counts[max(range(len(sizes)), key=lambda stage: sizes[stage] / counts[stage])] += 1
    return tuple(itertools.starmap(range, itertools.pairwise(itertools.accumulate(counts, initial=0))))
