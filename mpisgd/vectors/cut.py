"""Where a model is cut into stages, each held by one rank of a group, and which shards own the parameters of each [Dean12 3].

A stage is a run of children of a `torch.nn.Sequential`, and so, as modules are listed in the order of the flat vector, a piece of
that vector. Children without parameters stay with those before them, and children that have weights in common with each other.
Other models are cut by torch's splitter (`split.py`).
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
    """The stages of a model.

    Attributes:
        children: of the model, a Sequential, those of each stage; none where torch's splitter has cut it.
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

    def modules(self, model: FlatModel) -> Sequence[nn.Module]:
        """The stages of a model, which share its modules."""
        if model.traced is not None:
            return model.traced.modules
        return self.runs(model.module)

    def model_of(self, model: FlatModel, stage: int, memory_format: Any, autocast: Any) -> FlatModel:
        """A stage with flat vectors of its own: it takes its parameters out of the model."""
        only = None if model.traced is None else model.traced.only(stage)
        begins, _ = self.bounds[stage]
        return FlatModel(self.modules(model)[stage], memory_format, autocast=autocast, traced=only, begins=begins)

    def runs(self, model: nn.Module) -> list[nn.Sequential]:
        """The same of a Sequential that has no flat vectors."""
        children = list(model._modules.items())  # `named_children` leaves out one that is there twice
        return [nn.Sequential(OrderedDict[str, Any](children[own.start : own.stop])) for own in self.children]


class Unit(NamedTuple):
    """Children of a Sequential that stay together: the first and the last of them that have trainable parameters, in how many
    elements, and the name of the first."""

    name: str
    first: int
    last: int
    size: int


def units(model: nn.Module, count: int) -> list[Unit]:
    """What so many stages are to be made of. Raises ConfigError where the model is no Sequential."""
    if not is_sequential(model):
        raise ConfigError(
            f"group_size = {count}: the model is a {type(model).__name__}: expected a torch.nn.Sequential, or a factory that"
            " returns a list of modules, which can be cut into stages; or stages.at, the names of modules of any model"
        )
    found, unit = list[Unit](), dict[nn.Parameter, int]()
    for at, (name, child) in enumerate(model._modules.items()):
        trained = {each for each in child.parameters() if each.requires_grad}  # type: ignore[union-attr]
        new = trained - unit.keys()
        size = sum(parameter.numel() for parameter in new)
        if tied := [unit[parameter] for parameter in trained & unit.keys()]:
            first = min(tied)  # all from the first that it has weights in common with
            size += sum(each.size for each in found[first:])
            found[first:] = [found[first]._replace(last=at, size=size)]
            unit = {parameter: min(own, first) for parameter, own in unit.items()}
        elif new:
            found.append(Unit(name, at, at, size))
        unit |= dict.fromkeys(new, len(found) - 1)
    return found


def is_sequential(model: nn.Module) -> bool:
    """Whether a model is its children, one after the other."""
    return type(model).forward is nn.Sequential.forward


def are_children(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether a model can be cut before modules of these names without being traced."""
    return is_sequential(model) and all(name in model._modules for name in names)


def stages_from(model: FlatModel, count: int, shards: int, begin: Sequence[str] = ()) -> Stages:
    """As `cut_into_stages`, of a model that torch's splitter may have cut already."""
    if model.traced is None:
        return cut_into_stages(model.module, count, shards, begin)
    sizes = [sum(parameter.numel() for parameter in own) for own in model.traced.parameters]
    bounds = bounds_of([[Layer("", size)] for size in sizes])
    return Stages((), bounds, deal(shards, sizes))


def cut_into_stages(model: nn.Module, count: int, shards: int, begin: Sequence[str] = ()) -> Stages:
    """Cut a Sequential into so many stages, and give each some of the shards, by its parameters.

    `begin`: the names of the children that begin all stages but the first; where there are none, stages are of parameters as even
    as can be.

    Raises ConfigError where the model is no Sequential, has too few children with parameters of their own, or cannot be cut there.
    """
    found = units(model, count)
    if len(found) < count:
        raise ConfigError(
            f"group_size = {count}: expected at most the number of stages that the model can be cut into, {len(found)}"
            " (children of its Sequential, or modules of its list, with trainable parameters of their own)"
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
            " leave them, and all between them, in one stage"
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
    """Of a model whose children are pieces that are at work at the same time: each rank of a group has one."""
    sizes = [sum(parameter.numel() for parameter in piece.parameters() if parameter.requires_grad) for piece in model]
    edges = itertools.accumulate(sizes, initial=0)
    return Stages(
        tuple(range(place, place + 1) for place in range(len(sizes))), list(itertools.pairwise(edges)), deal(shards, sizes)
    )


def check_names(begin: Sequence[str], count: int) -> None:
    """Raises ConfigError where these are not as many as stages after the first."""
    if len(begin) != count - 1:
        raise ConfigError(
            f"stages.at = {list(begin)}: expected {count - 1} names for group_size = {count}, of the modules that begin the stages"
            " after the first"
        )


def deal(shards: int, sizes: list[int]) -> tuple[range, ...]:
    """One shard for each stage, and the others one by one where slices are largest."""
    counts = [1 for _ in sizes]
    for _ in range(shards - len(sizes)):
        counts[max(range(len(sizes)), key=lambda stage: sizes[stage] / counts[stage])] += 1
    return tuple(itertools.starmap(range, itertools.pairwise(itertools.accumulate(counts, initial=0))))
