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
from mpisgd.models.partitioned import Partitioned
from mpisgd.models.shared_memory import refuse_shared_memory


def make(
    options: CustomModelOptions,
    input_shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    needed: in_pieces.Needed | None = None,
    places: int = 1,
) -> nn.Module:
    """The module of `options.factory`, called with `options.kwargs`, and with input_shape, classes and seed where it
    has such parameters.

    Raises ConfigError where it cannot be imported or called, or returns no torch.nn.Module with parameters to train.
    """
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
    """Make a model as `make` does, from a factory that is already at hand. A list of modules is their Sequential; of a list of
    factories, those that are `needed` make their pieces; for several `places`, the factory makes the piece of each, or those."""
    if isinstance(factory, nn.Module):
        raise ConfigError(f"{field}: found a {type(factory).__name__}, expected a function (or class) that makes one on each rank")
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
        raise ConfigError(f"{field}: returned {type(model).__name__}, expected a torch.nn.Module, or a list of them")
    _check_values(model, input_shape, field, in_parts=isinstance(model, in_pieces.InPieces | Partitioned) and needed is not None)
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
    """What the factory makes: by itself, or for each of several places, or those of them that are `needed`."""
    if places > 1:
        return partitioned.build(factory, kwargs, offered, seed, field, places, needed)
    return call_factory(factory, kwargs, {**offered, "partition": Partition()}, field)


def _check_values(model: nn.Module, input_shape: tuple[int, ...], field: str, *, in_parts: bool) -> None:
    """Raises ConfigError for parameters and buffers without shapes or, but for pieces that other ranks have, without values."""
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(parameter):
            expected = f"a model that has seen a batch of inputs (n, {', '.join(map(str, input_shape))}) before it is returned"
            raise ConfigError(f"{field}: {name} of a lazy module has no shape yet, expected {expected}")
        if parameter.is_meta and not in_parts:
            raise ConfigError(f"{field}: {name} is on the device 'meta', without values, expected initial weights on the CPU")


def unknown_classes(who: str) -> ConfigError:
    """Make the error for a model that asks for the number of classes, where only reading all samples could tell."""
    return ConfigError(
        f"{who} needs the number of classes, which the data set does not tell, and its samples are not all read to find out:"
        " expected an attribute `classes` (a number, or the names) of the training Dataset, or its `targets`; or `data.classes` for"
        " an HDF5 file"
    )
