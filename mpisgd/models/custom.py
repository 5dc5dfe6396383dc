"""The user's own model, from a factory."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpisgd.config import CustomModelOptions
from mpisgd.errors import ConfigError
from mpisgd.imports import call_factory, load_attribute


def make(options: CustomModelOptions, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module of `options.factory`, called with `options.kwargs`, and with input_shape, classes and seed where it
    has such parameters.

    Raises ConfigError where it cannot be imported or called, or returns no torch.nn.Module with parameters to train.
    """
    factory = load_attribute(options.factory, "model.factory")
    field = f"model.factory = {options.factory!r}"
    return build(factory, options.kwargs, input_shape=input_shape, classes=classes, seed=seed, field=field)


def build(factory: Any, kwargs: dict[str, Any], *, input_shape: tuple[int, ...], classes: int, seed: int, field: str) -> nn.Module:
    """As `make`, of a factory that is already at hand."""
    if isinstance(factory, nn.Module):
        raise ConfigError(f"{field}: found a {type(factory).__name__}, expected a function (or class) that makes one on each rank")
    model = call_factory(factory, kwargs, {"input_shape": input_shape, "classes": classes, "seed": seed}, field)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{field}: returned {type(model).__name__}, expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{field}: returned {type(model).__name__} without parameters to train, expected at least one")
    return model
