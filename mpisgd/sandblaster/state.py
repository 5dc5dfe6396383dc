"""Coordinator's state between iterations, in plain numbers; vectors by the places of their slots in a checkpoint.

    coordinator   KEEP slot ... KEEP slot, SAVE    ->    shards write slots; place 0 has the weights
    manifest      numbers, with {"slot": place} for vectors

`al` is left out: torch writes it before any reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.sandblaster.remote import RemoteVector, Slot

_UNUSED = ("al",)


class Held(NamedTuple):
    """State after an iteration; holds its slots."""

    numbers: dict[str, Any]
    slots: list[Slot]


def held(weights: RemoteVector, state: Mapping[str, Any], **numbers: Any) -> Held:
    """Hold the optimiser's `state`, with the gradient of the weights."""
    slots = [weights.slot]
    table = {name: _packed(value, slots) for name, value in state.items() if name not in _UNUSED}
    return Held({**numbers, "gradient": _packed(weights.grad, slots), "state": table}, slots)


def restored(table: Mapping[str, Any], slots: list[Slot]) -> dict[str, Any]:
    """Return the optimiser's state; `slots` in the order of places."""
    return {name: _unpacked(value, slots) for name, value in table.items()}


def _packed(value: Any, slots: list[Slot]) -> Any:
    if isinstance(value, RemoteVector):
        place = next((place for place, slot in enumerate(slots) if slot is value.slot), len(slots))
        if place == len(slots):
            slots.append(value.slot)
        return {"slot": place}
    if isinstance(value, Tensor):
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list):
        return [_packed(each, slots) for each in value]
    if value is None or isinstance(value, int | float):
        return value
    raise ProtocolError(f"the optimiser's state has a {type(value).__name__}: this type cannot be saved")


def _unpacked(value: Any, slots: list[Slot]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, slots) for each in value]
    if not isinstance(value, dict):
        return value
    if "slot" in value:
        return RemoteVector(slots[value["slot"]])
    return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"]))
