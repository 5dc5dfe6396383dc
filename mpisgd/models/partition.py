"""What a module gets that is one piece of a layer-by-layer split model: its place, and the calls that join the pieces [Dean12 3].

All pieces of a group are at work on the same layer: each has some of its units, columns or rows. Each is a module of its own, made
by the same factory for another place. What one needs of the others, it gets by calls that are differentiable:

    exchange    the borders of the neighbours, for layers that are connected locally
    gather      the parts of all pieces, joined: after a Linear of which each has some of the outputs (columns)
    sum         the sum over all pieces: after a Linear of which each has some of the inputs (rows)

Each is the adjoint of its backward pass, as if all pieces were one function; the loss of that function is the loss of piece 0.
Sums are made in the order of pieces, so their bits are the same wherever the pieces are.

A parameter belongs to one piece, whatever its name: there are no copies that would have to be kept alike. What all add, a bias
after `sum`, say, one of them adds before it.

All pieces make the same calls in the same order. The backward pass meets them in the opposite order: autograd takes those functions
first that were made last (on a CPU, in one thread). So all pieces make the same calls there, too, and nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.base.errors import ConfigError

Parts = Sequence[Tensor | None]


class Links(Protocol):
    """What joins the pieces of a group: messages, or memory."""

    def deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        """Give `parts[j]` to piece j and take what it gives in this call, where `parts[j]` is not None; returns that, by pieces."""


class Partition:
    """A piece's place among all of a group, and its calls.

    Attributes:
        place: number of this piece, from 0.
        places: how many there are; with one, gather and sum return what they are given.
        reaches_all: whether a call of the last pass was one that joins all pieces.
    """

    def __init__(self, place: int = 0, places: int = 1) -> None:
        self.place = place
        self.places = places
        self.reaches_all = False
        self._links: Links | None = None
        self._calls = self._open = 0

    def share(self, size: int) -> range:
        """The part that this piece has of `size` units, columns or rows: even, the first pieces have one more.

        Raises ConfigError where there are fewer than pieces.
        """
        if size < self.places:
            raise ConfigError(f"group_size = {self.places}: expected at most what a layer can be cut into, {size}")
        base, more = divmod(size, self.places)
        start = self.place * base + min(self.place, more)
        return range(start, start + base + (self.place < more))

    def exchange(self, tensor: Tensor, halo: int, dim: int = -1) -> Tensor:
        """The tensor between the borders of both neighbours, `halo` wide: along `dim` it is 2 halo longer.

        Pieces lie along `dim` in the order of places. Outside of the first and of the last there are zeros.

        Raises ConfigError where the tensor is narrower than a border.
        """
        if not 0 <= halo <= tensor.shape[dim]:
            found = f"exchange: halo = {halo}: piece {self.place} of {self.places} has a tensor of shape {tuple(tensor.shape)}"
            raise ConfigError(f"{found}: expected a halo from 0 to its size along dim {dim}, {tensor.shape[dim]}")
        return self._call(_Exchange, tensor, halo, dim) if halo else tensor

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all pieces, joined along `dim` in the order of places; in all else they have one shape."""
        self.reaches_all = True
        return self._call(_Gather, tensor, dim) if self.places > 1 else tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the tensors of all pieces, which have one shape."""
        self.reaches_all = True
        return self._call(_Sum, tensor) if self.places > 1 else tensor

    # ------------------------------------------------------------------------------------------- for those who run a pass

    def begin(self, links: Links) -> None:
        """A pass begins, and these are the links."""
        self._links, self._calls, self._open, self.reaches_all = links, 0, 0, False

    def end(self) -> None:
        """The pass is over, forward and backward. Raises ConfigError where the loss has not come back to one of its calls."""
        self._links = None
        if self._open:
            raise ConfigError(
                f"model: piece {self.place} of {self.places} made {self._calls} calls of its partition, and in the backward pass"
                f" {self._calls - self._open}: expected what each returns to be used on the way to the loss, or else others wait"
            )

    def _call(self, function: Any, tensor: Tensor, *how: Any) -> Tensor:
        """All pieces pass each call backward, or none does, whoever of them has gradients for it."""
        self._calls += 1
        if self.places > 1 and torch.is_grad_enabled() and tensor.is_floating_point():
            self._open += 1
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
        result: Tensor = function.apply(tensor, self, self._calls - 1, *how)
        return result

    def _deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        if self._links is None:
            raise ConfigError(f"partition: piece {self.place} of {self.places} made a call outside of a pass of its model")
        return self._links.deal(call, [None if part is None else part.contiguous() for part in parts], back=back)

    def _swap(self, call: int, before: Tensor, after: Tensor, *, back: bool) -> tuple[Tensor | None, Tensor | None]:
        """Give these to the neighbours; returns what they give, None where there is none."""
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
        """The sum over pieces: each sums a part of it, and gives that to all."""
        own = _sum_of(self._deal(call, tensor.reshape(-1).tensor_split(self.places), back=back))
        return torch.cat(self._all(call, own, back=back)).view(tensor.shape)

    def came_back(self) -> None:
        self._open -= int(self.places > 1)


def _sum_of(parts: Parts) -> Tensor:
    """In the order of pieces; a new tensor."""
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
        """What neighbours have computed for this piece's borders is added."""
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
        """What all pieces have computed for this one's part is summed."""
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
