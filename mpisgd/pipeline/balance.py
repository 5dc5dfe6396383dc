"""Stages even in seconds: measured times of a model's children, forward and backward, on this machine."""

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
"""Measurements per child, after a warm-up."""


def measures_stages(config: Config) -> bool:
    """Return whether stages are to be even in seconds not measured yet."""
    return config.in_groups and config.stages.balance == "seconds" and not config.stages.at


def with_stages_at(config: Config, names: tuple[str, ...]) -> Config:
    return replace(config, stages=dataclasses.replace(config.stages, at=names))


def begun_at(
    config: Config, model: nn.Module, child: Callable[[int], nn.Module], inputs: Any, targets: Any, loss: Loss
) -> tuple[str, ...]:
    """Return the name of each later stage's first child: the longest stage is shortest, then the others even.

    `child` makes or gives a child with values; `inputs` and `targets` are a micro-batch. Raises ConfigError: an impossible cut, or
    a child not taking the output before.
    """
    found = units(model, config.group_size)
    if len(found) <= config.group_size:  # at most a single way to cut
        return tuple(each.name for each in found[1:]) if len(found) == config.group_size else ()
    measured = _seconds(config, list(model._modules), child, inputs, lambda output: loss(output, targets))
    edges = [0, *(each.first for each in found[1:]), len(measured)]
    taken = [sum(measured[start:end]) for start, end in itertools.pairwise(edges)]
    layers = [Layer(each.name, round(1e9 * seconds)) for each, seconds in zip(found, taken, strict=True)]
    return tuple(stage[0].name for stage in cut_between(layers, config.group_size, _least_longest(layers, config.group_size))[1:])


def _least_longest(layers: list[Layer], count: int) -> float:
    """Return the least size of the largest of `count` runs of layers."""
    ends = np.cumsum([0, *(layer.size for layer in layers)], dtype=np.float64)
    sizes = np.where(ends > ends[:, None], ends - ends[:, None], np.inf)
    least = np.where(ends > 0, np.inf, 0.0)
    for _ in range(count):
        least = np.maximum(least[:, None], sizes).min(axis=0)
    return float(least[-1])


def _seconds(
    config: Config, names: list[str], child: Callable[[int], nn.Module], inputs: Any, loss: Callable[[Any], Tensor]
) -> list[float]:
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
            weights = next((f", first weights of shape {tuple(each.shape)}" for each in module.parameters()), "")
            raise ConfigError(
                f"stages.balance = 'seconds': module {name!r}, a {type(module).__name__}, fails at inputs of shape"
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
    """Return the next child's input: detached, with a gradient if possible."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
