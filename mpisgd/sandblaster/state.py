"""What a coordinator knows between two iterations, as plain numbers: of vectors, the places that their slots have in a checkpoint.

    coordinator   KEEP slot ... KEEP slot, SAVE    ->    shards write these slots; that of place 0 are the weights
    manifest      numbers, with {"slot": place} where torch has a vector

A run that goes on has the same numbers and slots, and does what one would that was never stopped: `al`, which torch writes before
it reads it, is left out.
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
    """The state after an iteration, from which the run can go on: while it is held, its slots are."""

    numbers: dict[str, Any]
    slots: list[Slot]


def held(weights: RemoteVector, state: Mapping[str, Any], **numbers: Any) -> Held:
    """`state`: of the optimiser, for these weights, whose gradient is known where it is not empty."""
    slots = [weights.slot]
    table = {name: _packed(value, slots) for name, value in state.items() if name not in _UNUSED}
    return Held({**numbers, "gradient": _packed(weights.grad, slots), "state": table}, slots)


def restored(table: Mapping[str, Any], slots: list[Slot]) -> dict[str, Any]:
    """The optimiser's state, as it was; `slots` in the order of places."""
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
    raise ProtocolError(f"the optimiser's state has a {type(value).__name__}: it cannot be saved")


def _unpacked(value: Any, slots: list[Slot]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, slots) for each in value]
    if not isinstance(value, dict):
        return value
    if "slot" in value:
        return RemoteVector(slots[value["slot"]])
    return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"]))
