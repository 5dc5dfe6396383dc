"""Stages that are even in seconds: what each child of a model takes for a micro-batch, forward and backward, on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.gradient.objective import Loss
from mpisgd.vectors import nest
from mpisgd.vectors.cut import units
from mpisgd.vectors.flat import Layer, cut_between, in_channels_last

_TIMES = 5
"""So often each child is measured, after a first time."""


def measures_stages(config: Config) -> bool:
    """Whether stages are to be even in seconds that are not known yet."""
    return config.in_groups and config.stages.balance == "seconds" and not config.stages.at


def with_stages_at(config: Config, names: tuple[str, ...]) -> Config:
    """The configuration, which says where stages begin."""
    return replace(config, stages=dataclasses.replace(config.stages, at=names))


def begun_at(
    config: Config, model: nn.Module, child: Callable[[int], nn.Module], inputs: Any, targets: Any, loss: Loss
) -> tuple[str, ...]:
    """The names of the children that begin the stages after the first, so that the longest stage is as short as can be, and then
    the others as even.

    `child` makes or gives one of them, with its values, which may change; `inputs` and `targets` are a micro-batch. Raises
    ConfigError where the model cannot be cut, or a child does not take what the one before returned.
    """
    found = units(model, config.group_size)
    if len(found) <= config.group_size:  # is cut, or refused, in one way
        return tuple(each.name for each in found[1:]) if len(found) == config.group_size else ()
    measured = _seconds(config, list(model._modules), child, inputs, lambda output: loss(output, targets))
    edges = [0, *(each.first for each in found[1:]), len(measured)]
    taken = [sum(measured[start:end]) for start, end in itertools.pairwise(edges)]
    layers = [Layer(each.name, round(1e9 * seconds)) for each, seconds in zip(found, taken, strict=True)]
    return tuple(stage[0].name for stage in cut_between(layers, config.group_size, _least_longest(layers, config.group_size))[1:])


def _least_longest(layers: list[Layer], count: int) -> float:
    """The size of the largest of so many runs of layers, where they are cut so that it is least."""
    ends = np.cumsum([0, *(layer.size for layer in layers)], dtype=np.float64)
    sizes = np.where(ends > ends[:, None], ends - ends[:, None], np.inf)
    least = np.where(ends > 0, np.inf, 0.0)
    for _ in range(count):
        least = np.maximum(least[:, None], sizes).min(axis=0)
    return float(least[-1])


def _seconds(
    config: Config, names: list[str], child: Callable[[int], nn.Module], inputs: Any, loss: Callable[[Any], Tensor]
) -> list[float]:
    """Of each child, medians."""
    four = config.memory_format == "channels_last"
    passed, found = nest.mapped(inputs, in_channels_last) if four else inputs, list[float]()
    for at, name in enumerate(names):
        module = child(at)
        if four:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        taken = []
        try:
            for _ in range(1 + _TIMES):
                start_s = time.perf_counter()
                with _casting(config):
                    output = module(passed)
                    reached = loss(output) if at + 1 == len(names) else output
                _backward(reached)
                taken.append(time.perf_counter() - start_s)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in nest.tensors_of(passed).values())
            weights = next((f", its first weights are of shape {tuple(each.shape)}" for each in module.parameters()), "")
            raise ConfigError(
                f"stages.balance = 'seconds': module {name!r}, a {type(module).__name__}, fails at what comes to it, of shape"
                f" {shapes}{weights}: {type(error).__name__}: {error}"
            ) from error
        found.append(statistics.median(taken[1:]))
        passed = nest.mapped(output, _entering)
    return found


def _casting(config: Config) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if config.autocast != "off" else nullcontext()


def _backward(reached: Any) -> None:
    ends = [each for each in nest.tensors_of(reached).values() if each.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])


def _entering(_: str, value: Any) -> Any:
    """What the next child begins with: without what came before, and with a gradient, where it can have one."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
