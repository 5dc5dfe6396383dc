"""Vectors without elements: torch tensors whose operations are commands to the shards.

    torch.optim.LBFGS            q.add_(y, alpha=-a)           unmodified
    RemoteVector                 `__torch_function__`          each function is a command, or a number
    Commands                     ADD out = q - a y             to all shards; only numbers travel

Nothing is overridden deeper in torch (`__torch_dispatch__`): there this thread's gradients are off, and virtual ranks compute
meanwhile. Operations that get so deep are refused.

Slots never change (`slots.py`): a change in place makes a new slot, a clone is the same slot, the last reference frees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import Op


class Commands(Protocol):
    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        """Command all shards."""

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        """Command all; return the answers."""


class Store:
    """Numbers of slots, (elements,) over all shards."""

    def __init__(self, commands: Commands, elements: int, first: int = 1) -> None:
        self.commands = commands
        self.elements = elements
        self.next = first

    def new(self) -> int:
        number, self.next = self.next, self.next + 1
        return number

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0) -> None:
        """Command with gradients on, unlike torch's step: other ranks may compute in this thread meanwhile."""
        with torch.enable_grad():
            self.commands.do(op, out, a, b, alpha)

    def ask(self, op: Op, a: int, b: int = 0) -> list[float]:
        with torch.enable_grad():
            return self.commands.ask(op, a=a, b=b)


class Slot:
    """Slot, freed with its last reference; equal `origin` = equal elements."""

    def __init__(self, store: Store, number: int, origin: Any = None) -> None:
        self.store = store
        self.number = number
        self.origin: tuple[Any, ...] = (number,) if origin is None else origin

    def __del__(self) -> None:
        self.store.do(Op.FREE, a=self.number)

    def made(self, op: Op, b: Slot | None = None, alpha: float = 0.0) -> Slot:
        store, other = self.store, self.number if b is None else b.number
        number = store.new()
        store.do(op, number, self.number, other, alpha)
        return Slot(store, number, (op, self.number, other, alpha))


class RemoteVector(Tensor):
    """Vector, (elements,) float32; `moved` is called with each new slot."""

    slot: Slot
    moved: Callable[[Slot], None] | None
    _gradient: RemoteVector | None
    _absolute: bool
    """Stands for absolute values: only greatest and sum are known."""
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
            raise ProtocolError("a view of a vector on shards cannot be changed in place")
        self.slot = slot
        if self.moved is not None:
            self.moved(slot)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = OPERATIONS.get(func)
        absolute = any(isinstance(each, RemoteVector) and each._absolute for each in args)
        if operation is None or (absolute and func not in _OF_ABSOLUTES):
            with torch._C.DisableTorchFunctionSubclass():  # a size, a type; computations come to `__torch_dispatch__`
                return func(*args, **(kwargs or {}))
        return operation(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        known = ", ".join(dict.fromkeys(each.__name__ for each in OPERATIONS))
        raise ProtocolError(f"{func}: unknown for vectors on shards, expected {known}")


def _whole(vector: RemoteVector, *_: Any, **__: Any) -> RemoteVector:
    return RemoteVector(vector.slot, view=True)


def _slice(vector: RemoteVector, which: Any) -> RemoteVector:
    size = vector.slot.store.elements
    if not isinstance(which, slice) or which.indices(size) != (0, size, 1):
        raise ProtocolError(f"[{which}] of a vector of {size} elements on shards: expected the whole vector")
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
        raise ProtocolError(f"aten.sub of vectors on shards: alpha = {alpha}, expected 1")
    return RemoteVector(one.slot.made(Op.SUB, other.slot))


def _mul(vector: RemoteVector, factor: float | Tensor) -> RemoteVector:
    return RemoteVector(vector.slot.made(Op.SCALE, alpha=float(factor)))


def _dot(one: RemoteVector, other: RemoteVector) -> Tensor:
    return _number(Op.DOT, one.slot.store.ask(Op.DOT, one.slot.number, other.slot.number))


def _max(vector: RemoteVector) -> Tensor:
    return _of_absolutes(vector, Op.ABSMAX)


def _sum(vector: RemoteVector, **_: Any) -> Tensor:
    return _of_absolutes(vector, Op.ABSSUM)


def _of_absolutes(vector: RemoteVector, op: Op) -> Tensor:
    if not vector._absolute:
        raise ProtocolError("of a vector on shards only absolute values are summed and compared")
    return _number(op, vector.slot.store.ask(op, vector.slot.number))


def combined(op: Op, values: Sequence[float]) -> float:
    """Return the answer for all slices, in float64."""
    if op is Op.ABSMAX:
        return math.nan if any(map(math.isnan, values)) else max(values)
    return sum(values)


def _number(op: Op, values: Sequence[float]) -> Tensor:
    """Return a float32 scalar: with a single shard, torch's own value."""
    return torch.tensor(combined(op, values), dtype=torch.float32)


OPERATIONS: dict[Any, Callable[..., Any]] = {
    Tensor.add_: _add,
    Tensor.sub: _sub,
    Tensor.mul: _mul,
    torch.mul: _mul,
    Tensor.neg: lambda vector: _mul(vector, -1.0),
    Tensor.copy_: lambda one, other: one._become(other.slot),
    Tensor.clone: _clone,
    Tensor.dot: _dot,
    Tensor.abs: lambda vector: RemoteVector(vector.slot, absolute=True),
    Tensor.max: _max,
    Tensor.sum: _sum,
    Tensor.view: _whole,
    Tensor.view_as: _whole,
    Tensor.__getitem__: _slice,
    torch.cat: _cat,
}
"""Functions of vectors in `torch.optim.LBFGS`, pinned by a test; another optimiser may need more."""
_OF_ABSOLUTES = (Tensor.max, Tensor.sum)
