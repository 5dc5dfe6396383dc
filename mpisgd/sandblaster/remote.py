"""Vectors without elements: a torch tensor whose operations are commands to the shards, where its slices lie.

    torch.optim.LBFGS            q.add_(y, alpha=-a)           as it is in torch; it knows nothing of this
    RemoteVector                 `__torch_dispatch__`          each aten operation it uses is a command, or a number
    Commands                     ADD out = q - a y             to all shards; nothing but numbers travels

Slots on the shards never change (`slots.py`): what torch changes in place becomes a new slot here, a clone is the same slot, and a
slot goes when nobody refers to it any more. By how a slot was made (`origin`) a point is known again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import Op

aten = torch.ops.aten


class Commands(Protocol):
    """Where slots live."""

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        """Command it of all shards."""

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        """As `do`; returns the answers of all shards, in their order."""


class Store:
    """Numbers for slots, (elements,) over all shards; slot 0 are the initial weights, the next is `first`."""

    def __init__(self, commands: Commands, elements: int, first: int = 1) -> None:
        self.commands = commands
        self.elements = elements
        self.next = first

    def new(self) -> int:
        number, self.next = self.next, self.next + 1
        return number


class Slot:
    """A slot, while anybody refers to it. `origin`: two of the same have the same elements."""

    def __init__(self, store: Store, number: int, origin: Any = None) -> None:
        self.store = store
        self.number = number
        self.origin: tuple[Any, ...] = (number,) if origin is None else origin

    def __del__(self) -> None:
        self.store.commands.do(Op.FREE, a=self.number)

    def made(self, op: Op, b: Slot | None = None, alpha: float = 0.0) -> Slot:
        """A new slot, made from this one, and perhaps another."""
        store, other = self.store, self.number if b is None else b.number
        number = store.new()
        store.commands.do(op, number, self.number, other, alpha)
        return Slot(store, number, (op, self.number, other, alpha))


class RemoteVector(Tensor):
    """(elements,) float32. `moved` is told whenever it becomes another slot."""

    slot: Slot
    moved: Callable[[Slot], None] | None
    _gradient: RemoteVector | None
    _absolute: bool
    """It stands for the absolute values of its slot; only their greatest and their sum are ever asked for."""
    _view: bool

    @staticmethod
    def __new__(cls, slot: Slot, *, absolute: bool = False, view: bool = False) -> RemoteVector:
        vector: RemoteVector = Tensor._make_wrapper_subclass(cls, (slot.store.elements,), dtype=torch.float32)
        vector.slot, vector.moved, vector._gradient = slot, None, None
        vector._absolute, vector._view = absolute, view
        return vector

    @property  # type: ignore[override]
    def grad(self) -> RemoteVector | None:
        return self._gradient

    @grad.setter
    def grad(self, gradient: RemoteVector | None) -> None:
        self._gradient = gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteVector(slot {self.slot.number})"

    def _become(self, slot: Slot) -> RemoteVector:
        if self._view or self._absolute:
            raise ProtocolError("a view of a vector that lies on shards cannot be changed in place")
        self.slot = slot
        if self.moved is not None:
            self.moved(slot)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation = OPERATIONS.get(func)
        vectors = [each for each in args if isinstance(each, RemoteVector)]
        if operation is None or (any(each._absolute for each in vectors) and func not in _OF_ABSOLUTES):
            raise ProtocolError(f"{func}: not known of vectors that lie on shards, which have {', '.join(map(str, OPERATIONS))}")
        return operation(*args, **(kwargs or {}))


def _whole(vector: RemoteVector, *_: Any, **__: Any) -> RemoteVector:
    return RemoteVector(vector.slot, view=True)


def _slice(vector: RemoteVector, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> RemoteVector:
    size = vector.slot.store.elements
    if (dim, start or 0, step) != (0, 0, 1) or min(size if end is None else end, size) != size:
        raise ProtocolError(f"[{start}:{end}:{step}] of a vector of {size} elements that lies on shards: expected all of it")
    return _whole(vector)


def _cat(vectors: list[RemoteVector], dim: int = 0) -> RemoteVector:
    (vector,) = vectors
    return RemoteVector(vector.slot)


def _clone(vector: RemoteVector, **_: Any) -> RemoteVector:
    return RemoteVector(vector.slot)


def _add(one: RemoteVector, other: RemoteVector, alpha: float = 1) -> RemoteVector:
    return one._become(one.slot.made(Op.ADD, other.slot, float(alpha)))


def _sub(one: RemoteVector, other: RemoteVector, alpha: float = 1) -> RemoteVector:
    if alpha != 1:
        raise ProtocolError(f"aten.sub of vectors that lie on shards: alpha = {alpha}, expected 1")
    return RemoteVector(one.slot.made(Op.SUB, other.slot))


def _mul(vector: RemoteVector, factor: float | Tensor) -> RemoteVector:
    return RemoteVector(vector.slot.made(Op.SCALE, alpha=float(factor)))


def _dot(one: RemoteVector, other: RemoteVector) -> Tensor:
    return _number(sum(one.slot.store.commands.ask(Op.DOT, a=one.slot.number, b=other.slot.number)))


def _max(vector: RemoteVector) -> Tensor:
    values = _of_absolutes(vector, Op.ABSMAX)
    return _number(math.nan if any(map(math.isnan, values)) else max(values))


def _sum(vector: RemoteVector, **_: Any) -> Tensor:
    return _number(sum(_of_absolutes(vector, Op.ABSSUM)))


def _of_absolutes(vector: RemoteVector, op: Op) -> list[float]:
    if not vector._absolute:
        raise ProtocolError("of a vector that lies on shards only absolute values are summed and compared")
    return vector.slot.store.commands.ask(op, a=vector.slot.number)


def _number(value: float) -> Tensor:
    """What shards answer are sums of their slices, in float64: as torch has them, where there is one shard."""
    return torch.tensor(value, dtype=torch.float32)


OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.neg.default: lambda vector: _mul(vector, -1.0),
    aten.copy_.default: lambda one, other, non_blocking=False: one._become(other.slot),
    aten.clone.default: _clone,
    aten.dot.default: _dot,
    aten.abs.default: lambda vector: RemoteVector(vector.slot, absolute=True),
    aten.max.default: _max,
    aten.sum.default: _sum,
    aten.view.default: _whole,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
}
"""All that `torch.optim.LBFGS` does with vectors; a test pins them. Another optimiser may want more."""
_OF_ABSOLUTES = (aten.max.default, aten.sum.default)
