"""A piece's place in a model split within layers, and the calls that join pieces [Dean12 3].

All pieces of a group work on the same layer; each has some units, columns or rows. Differentiable calls join them:

    exchange    borders of the neighbours, for locally connected layers
    gather      parts of all pieces, joined: after a Linear split by outputs (columns)
    sum         sum over all pieces: after a Linear split by inputs (rows)

Each call is the adjoint of its backward pass, as if all pieces were one function with piece 0's loss. Sums run in the order of
pieces: equal bits anywhere. A parameter belongs to one piece, without copies; one piece adds a shared bias before `sum`.

All pieces make the same calls in the same order. Autograd takes the functions made last first: the order is common backward, too,
and no piece waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.base.errors import ConfigError

Parts = Sequence[Tensor | None]


class Links(Protocol):
    """Connections of a group's pieces: messages or memory."""

    def deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        """Give `parts[j]` to piece j; return the pieces' parts where `parts[j]` is not None."""


class Partition:
    """A piece's place in its group, and its calls.

    Attributes:
        reaches_all: whether the last pass called gather or sum.
    """

    def __init__(self, place: int = 0, places: int = 1) -> None:
        self.place = place
        self.places = places
        self.reaches_all = False
        self._links: Links | None = None
        self._calls = self._open = 0

    def share(self, size: int) -> range:
        """Return this piece's even part of `size` units; the first pieces have one more."""
        if size < self.places:
            raise ConfigError(f"group_size = {self.places}: expected at most the units of a layer, {size}")
        base, more = divmod(size, self.places)
        start = self.place * base + min(self.place, more)
        return range(start, start + base + (self.place < more))

    def exchange(self, tensor: Tensor, halo: int, dim: int = -1) -> Tensor:
        """Return the tensor between both neighbours' borders, 2 `halo` longer along `dim`; zeros beyond first and last piece."""
        if not 0 <= halo <= tensor.shape[dim]:
            found = f"exchange: halo = {halo}: piece {self.place} of {self.places} has a tensor of shape {tuple(tensor.shape)}"
            raise ConfigError(f"{found}: expected a halo from 0 to the tensor's size along dim {dim}, {tensor.shape[dim]}")
        return self._call(_Exchange, tensor, halo, dim) if halo else tensor

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return all pieces' tensors, joined along `dim`."""
        self.reaches_all = True
        return self._call(_Gather, tensor, dim) if self.places > 1 else tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all pieces' tensors, of one shape."""
        self.reaches_all = True
        return self._call(_Sum, tensor) if self.places > 1 else tensor

    # ------------------------------------------------------------------------------------------- for the runner of a pass

    def begin(self, links: Links) -> None:
        self._links, self._calls, self._open, self.reaches_all = links, 0, 0, False

    def end(self) -> None:
        """End both passes. Raises ConfigError: the loss has not come back to a call."""
        self._links = None
        if self._open:
            raise ConfigError(
                f"model: piece {self.place} of {self.places} made {self._calls} calls of the partition, and in the backward pass"
                f" {self._calls - self._open}: expected the loss to use the result of each call, or else other pieces wait"
            )

    def _call(self, function: Any, tensor: Tensor, *how: Any) -> Tensor:
        """Make a call; with gradients on, force its backward pass, awaited by other pieces."""
        self._calls += 1
        if self.places > 1 and torch.is_grad_enabled() and tensor.is_floating_point():
            self._open += 1
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
        result: Tensor = function.apply(tensor, self, self._calls - 1, *how)
        return result

    def _deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        if self._links is None:
            raise ConfigError(f"partition: piece {self.place} of {self.places} made a call outside of a pass of the model")
        return self._links.deal(call, [None if part is None else part.contiguous() for part in parts], back=back)

    def _swap(self, call: int, before: Tensor, after: Tensor, *, back: bool) -> tuple[Tensor | None, Tensor | None]:
        """Give borders to the neighbours; return theirs, or None."""
        if self.places == 1:
            return None, None
        parts: list[Tensor | None] = [None] * self.places
        if self.place:
            parts[self.place - 1] = before
        if self.place + 1 < self.places:
            parts[self.place + 1] = after
        taken = self._deal(call, parts, back=back)
        return taken[self.place - 1] if self.place else None, taken[self.place + 1] if self.place + 1 < self.places else None

    def _all(self, call: int, tensor: Tensor, *, back: bool) -> list[Tensor]:
        return [part for part in self._deal(call, [tensor] * self.places, back=back) if part is not None]

    def _reduced(self, call: int, tensor: Tensor, *, back: bool) -> Tensor:
        """Return the sum over pieces: each sums a part for all."""
        own = _sum_of(self._deal(call, tensor.reshape(-1).tensor_split(self.places), back=back))
        return torch.cat(self._all(call, own, back=back)).view(tensor.shape)

    def came_back(self) -> None:
        self._open -= int(self.places > 1)


def _sum_of(parts: Parts) -> Tensor:
    first, *others = (part for part in parts if part is not None)
    total = first.clone()
    for part in others:
        total += part
    return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, partition: Partition, call: int, halo: int, dim: int) -> Tensor:
        ctx.of = partition, call, halo, dim
        size = tensor.shape[dim]
        borders = partition._swap(call, tensor.narrow(dim, 0, halo), tensor.narrow(dim, size - halo, halo), back=False)
        before, after = (torch.zeros_like(tensor.narrow(dim, 0, halo)) if border is None else border for border in borders)
        return torch.cat([before, tensor, after], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Add the neighbours' gradients for this piece's borders."""
        (partition, call, halo, dim), (gradient,) = ctx.of, gradients
        size = gradient.shape[dim] - 2 * halo
        own = gradient.narrow(dim, halo, size).clone()
        back = partition._swap(call, gradient.narrow(dim, 0, halo), gradient.narrow(dim, halo + size, halo), back=True)
        for border, start in zip(back, (0, size - halo), strict=True):
            if border is not None:
                own.narrow(dim, start, halo).add_(border)
        partition.came_back()
        return own, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, partition: Partition, call: int, dim: int) -> Tensor:
        parts = partition._all(call, tensor, back=False)
        ctx.of = partition, call, dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum all gradients for this piece's part."""
        partition, call, dim, sizes = ctx.of
        own = _sum_of(partition._deal(call, torch.split(gradients[0], sizes, dim), back=True))
        partition.came_back()
        return own, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, partition: Partition, call: int) -> Tensor:
        ctx.of = partition, call
        return partition._reduced(call, tensor, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        partition, call = ctx.of
        own = partition._reduced(call, gradients[0], back=True)
        partition.came_back()
        return own, None, None
