"""The user's own model, from a factory."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import call_factory, load_attribute, required_of
from mpisgd.config import CustomModelOptions
from mpisgd.models import in_pieces, partitioned
from mpisgd.models.partition import Partition
from mpisgd.models.shared_memory import refuse_shared_memory


def make(
    options: CustomModelOptions,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    needed: in_pieces.Needed | None = None,
    places: int = 1,
) -> nn.Module:
    """Return the module of `options.factory`. Raises ConfigError: no factory, a failed call, or no trainable torch.nn.Module."""
    factory = load_attribute(options.factory, "model.factory")
    field = f"model.factory = {options.factory!r}"
    own: dict[str, Any] = {"input_shape": input_shape, "classes": classes, "seed": seed, "needed": needed, "places": places}
    return build(factory, options.kwargs, field=field, **own)


def build(
    factory: Any,
    kwargs: dict[str, Any],
    *,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    field: str,
    needed: in_pieces.Needed | None = None,
    places: int = 1,
) -> nn.Module:
    """Return a model as `make`, from a loaded factory.

    A list of modules becomes a Sequential. Of a list of factories, or several `places`, all or the `needed` pieces are made.
    """
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"{field}: found a {type(factory).__name__}, expected a function (or class) that makes a model on each rank"
        )
    offered = {"input_shape": input_shape, "seed": seed}
    if classes is not None:
        offered["classes"] = classes
    elif "classes" not in kwargs and "classes" in required_of(factory):
        raise unknown_classes(field)
    model = build_pieces(factory, kwargs, offered, seed, field, places, needed)
    if in_pieces.are_factories(model):
        model = in_pieces.build(model, offered, seed, field, needed)
    elif isinstance(model, list | tuple | nn.ModuleList) and all(isinstance(each, nn.Module) for each in model):
        model = nn.Sequential(*model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{field}: returned {type(model).__name__}, expected a torch.nn.Module, or a list of modules")
    _check_values(model, input_shape, field, in_parts=isinstance(model, in_pieces.Pieces) and needed is not None)
    refuse_shared_memory(model, field)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{field}: returned {type(model).__name__} without parameters to train, expected at least one")
    return model


def build_pieces(
    factory: Any,
    kwargs: dict[str, Any],
    offered: dict[str, Any],
    seed: int,
    field: str,
    places: int,
    needed: in_pieces.Needed | None = None,
) -> Any:
    if places > 1:
        return partitioned.build(factory, kwargs, offered, seed, field, places, needed)
    return call_factory(factory, kwargs, {**offered, "partition": Partition()}, field)


def _check_values(model: nn.Module, input_shape: tuple[int, ...], field: str, *, in_parts: bool) -> None:
    """Raise ConfigError for parameters or buffers without shape or, outside other ranks' pieces, values."""
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(parameter):
            expected = f"a model that has seen a batch of inputs (n, {', '.join(map(str, input_shape))}) in the factory"
            raise ConfigError(f"{field}: {name} of a lazy module has no shape yet, expected {expected}")
        if parameter.is_meta and not in_parts:
            raise ConfigError(f"{field}: {name} is on the device 'meta', without values, expected initial weights on the CPU")


def unknown_classes(who: str) -> ConfigError:
    return ConfigError(
        f"{who} needs the number of classes: the data set does not tell, and not all samples are read to find out:"
        " expected an attribute `classes` (a number, or the names) or `targets` of the training Dataset; or `data.classes` for"
        " an HDF5 file"
    )
