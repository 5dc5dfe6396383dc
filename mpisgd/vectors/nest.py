"""Batches of any shape: nested containers, dataclasses and mappings of tensors.

`torch.utils._pytree` also knows registered containers (e.g. Hugging Face outputs).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree

from mpisgd.base.errors import DataError

Place = Callable[[str, Any], Any]
"""Maker of a replacement, from a name, e.g. "['labels']", and a tensor or object with `to`."""

_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


def mapped(nest: Any, place: Place, name: str = "") -> Any:
    """Return the nest with tensors replaced by `place`; numbers, text and None stay.

    Objects with a method `to` (a packed sequence, a batch of graphs) are replaced, too. Raises DataError for others.
    """

    if isinstance(nest, Tensor):
        return place(name, nest)

    def leaf(path: Any, value: Any) -> Any:
        return _mapped_leaf(value, place, name + _pytree.keystr(path))

    return _pytree.tree_map_with_path(leaf, nest)


def tensors_of(nest: Any) -> dict[str, Tensor]:
    """Return the tensors by name. Raises DataError."""
    found = {}

    def note(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            found[name] = value
        return value

    mapped(nest, note)
    return found


def _mapped_leaf(value: Any, place: Place, name: str) -> Any:
    if isinstance(value, Tensor):
        return place(name, value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        changed = {key: mapped(each, place, f"{name}[{key!r}]") for key, each in value.items()}
        if not hasattr(value, "__setitem__"):
            return type(value)(changed)  # type: ignore[call-arg]
        clone: Any = copy.copy(value)
        for key, each in changed.items():
            clone[key] = each
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, mapped(getattr(value, field.name), place, f"{name}.{field.name}"))
        return clone
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return place(name, value)
    raise DataError(
        f"batch{name} is a {type(value).__name__}, expected a nest (dict, tuple, list, dataclass) of tensors, numbers and text"
    )
