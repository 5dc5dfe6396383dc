"""Stages of a model, each held by one rank of a group, and the shards of each [Dean12 3].

A stage is a run of children of a `torch.nn.Sequential`, hence a piece of the flat vector. Children without parameters stay with
predecessors; children with common weights stay together. Torch's splitter cuts other models (`split.py`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.flat import FlatModel, Layer, bounds_of, cut_between, slice_bounds

Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class Stages:
    """Stages of a model.

    Attributes:
        children: each stage's children of a Sequential; none from torch's splitter.
        bounds: pieces of the flat vector.
    """

    children: tuple[range, ...]
    bounds: Bounds
    shards: tuple[range, ...]

    def of_shard(self, shard: int) -> int:
        return next(stage for stage, shards in enumerate(self.shards) if shard in shards)

    @property
    def listed(self) -> list[list[int]]:
        return [list(shards) for shards in self.shards]

    @property
    def slices(self) -> Bounds:
        """Each shard's slice, an even cut of its stage's piece."""
        found = []
        for (start, end), shards in zip(self.bounds, self.shards, strict=True):
            found += [(start + begin, start + stop) for begin, stop in slice_bounds(end - start, len(shards))]
        return found

    def slices_of(self, stage: int) -> Bounds:
        """Return a stage's slices, within its own piece."""
        start, _ = self.bounds[stage]
        return [(begin - start, end - start) for begin, end in self.slices[self.shards[stage].start : self.shards[stage].stop]]

    def modules(self, model: FlatModel) -> Sequence[nn.Module]:
        """Return the stages, which share the model's modules."""
        if model.traced is not None:
            return model.traced.modules
        return self.runs(model.module)

    def model_of(self, model: FlatModel, stage: int, memory_format: Any, autocast: Any) -> FlatModel:
        """Make a stage with its own flat vectors, taking parameters out of the model."""
        only = None if model.traced is None else model.traced.only(stage)
        begins, _ = self.bounds[stage]
        return FlatModel(self.modules(model)[stage], memory_format, autocast=autocast, traced=only, begins=begins)

    def runs(self, model: nn.Module) -> list[nn.Sequential]:
        """Return the stages of a Sequential without flat vectors."""
        children = list(model._modules.items())  # `named_children` omits duplicates
        return [nn.Sequential(OrderedDict[str, Any](children[own.start : own.stop])) for own in self.children]


class Unit(NamedTuple):
    """Inseparable children: first name, first and last trainable child, elements."""

    name: str
    first: int
    last: int
    size: int


def units(model: nn.Module, count: int) -> list[Unit]:
    """Return the units of a model. Raises ConfigError unless a Sequential."""
    if not is_sequential(model):
        raise ConfigError(
            f"group_size = {count}: the model is a {type(model).__name__}: expected a torch.nn.Sequential, or a factory that"
            " returns a list of modules, to cut into stages; or stages.at, the names of modules of any model"
        )
    found, unit = list[Unit](), dict[nn.Parameter, int]()
    for at, (name, child) in enumerate(model._modules.items()):
        trained = {each for each in child.parameters() if each.requires_grad}  # type: ignore[union-attr]
        new = trained - unit.keys()
        size = sum(parameter.numel() for parameter in new)
        if tied := [unit[parameter] for parameter in trained & unit.keys()]:
            first = min(tied)  # merge all since the first with common weights
            size += sum(each.size for each in found[first:])
            found[first:] = [found[first]._replace(last=at, size=size)]
            unit = {parameter: min(own, first) for parameter, own in unit.items()}
        elif new:
            found.append(Unit(name, at, at, size))
        unit |= dict.fromkeys(new, len(found) - 1)
    return found


def is_sequential(model: nn.Module) -> bool:
    return type(model).forward is nn.Sequential.forward


def are_children(model: nn.Module, names: Sequence[str]) -> bool:
    """Return whether a cut before these modules needs no tracing."""
    return is_sequential(model) and all(name in model._modules for name in names)


def stages_from(model: FlatModel, count: int, shards: int, begin: Sequence[str] = ()) -> Stages:
    """Cut as `cut_into_stages`, or as torch's splitter has."""
    if model.traced is None:
        return cut_into_stages(model.module, count, shards, begin)
    sizes = [sum(parameter.numel() for parameter in own) for own in model.traced.parameters]
    bounds = bounds_of([[Layer("", size)] for size in sizes])
    return Stages((), bounds, deal(shards, sizes))


def cut_into_stages(model: nn.Module, count: int, shards: int, begin: Sequence[str] = ()) -> Stages:
    """Cut a Sequential into stages, and deal the shards by parameters.

    `begin`: children that begin later stages; none = even cuts.

    Raises ConfigError if the model is no Sequential, has too few children with parameters, or cannot be cut there.
    """
    found = units(model, count)
    if len(found) < count:
        raise ConfigError(
            f"group_size = {count}: expected at most the number of possible stages of the model, {len(found)}"
            " (children of the Sequential, or modules of the list, with trainable parameters of their own)"
        )
    children = list(model._modules)
    if begin:
        check_names(begin, count)
        for name in begin:
            if name not in children:
                raise ConfigError(f"stages.at: the model has no child {name!r}, expected some of {', '.join(children)}")
        starts = sorted(children.index(name) for name in begin)
    else:
        dealt = cut_between([Layer(each.name, each.size) for each in found], count)
        starts = [found[at].first for at in itertools.accumulate(map(len, dealt[:-1]))]
    runs = tuple(itertools.starmap(range, itertools.pairwise([0, *starts, len(children)])))
    own = [[Layer(each.name, each.size) for each in found if each.first in run and each.last in run] for run in runs]
    if sum(map(len, own)) < len(found):
        one = next(each for each in found if any(each.first < start <= each.last for start in starts))
        raise ConfigError(
            f"stages.at = {list(begin)}: modules {one.name!r} and {children[one.last]!r} have weights in common, expected cuts that"
            " leave both, and all modules between, in one stage"
        )
    for run, layers in zip(runs, own, strict=True):
        if not layers:
            raise ConfigError(
                f"stages.at = {list(begin)}: the stage that begins with module {children[run.start]!r} has no trainable parameters,"
                " expected some in each"
            )
    bounds = bounds_of(own)
    return Stages(runs, bounds, deal(shards, [end - start for start, end in bounds]))


def cut_between_pieces(model: nn.Sequential, shards: int) -> Stages:
    """Return stages of concurrent pieces, one per rank."""
    sizes = [sum(parameter.numel() for parameter in piece.parameters() if parameter.requires_grad) for piece in model]
    edges = itertools.accumulate(sizes, initial=0)
    return Stages(
        tuple(range(place, place + 1) for place in range(len(sizes))), list(itertools.pairwise(edges)), deal(shards, sizes)
    )


def check_names(begin: Sequence[str], count: int) -> None:
    """Raise ConfigError unless each stage after the first has a name."""
    if len(begin) != count - 1:
        raise ConfigError(
            f"stages.at = {list(begin)}: expected {count - 1} names for group_size = {count}, of the modules that begin the stages"
            " after the first"
        )


def deal(shards: int, sizes: list[int]) -> tuple[range, ...]:
    """Deal a shard to each stage, the rest where slices are largest."""
    counts = [1 for _ in sizes]
    for _ in range(shards - len(sizes)):
        counts[max(range(len(sizes)), key=lambda stage: sizes[stage] / counts[stage])] += 1
    return tuple(itertools.starmap(range, itertools.pairwise(itertools.accumulate(counts, initial=0))))
