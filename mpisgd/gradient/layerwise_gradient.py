"""A mini-batch's gradient whose slices are exchanged one by one, as forward and backward pass reach and leave their layers.

Weights are asked for when the forward pass is about to enter a module that owns some of a slice's parameters; a gradient is told
when the backward pass has accumulated the last parameter of its slice. So the order is that of the passes, whatever that of the
vector: layers may be tied, entered often, out of order, or not at all.

A module whose parameters are used without it being called (attention's output projection, say) does not show when. The first
mini-batch is computed once to see which are called: for the others, that is asked when the nearest module around them is entered.

Of an allreduce, whose weights are all there, buckets are told in the place of slices (`vectors/buckets.py`). What autograd never
comes to, because the loss does not depend on it, is told at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.gradient.gradient import Gradient
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import FlatModel


class LayerwiseGradient(Computes):
    """Computes the mini-batches of `gradient`, on the CPU, and tells `exchange` which slice is needed, and which is left.

    Args:
        gradient: of `model`; of several mini-batches, `single` computes each.
        pushed: `gradient`, or what is pushed of it.
        bounds: the slices of the flat vector; a large parameter may be in several.
        held: no slice is left before the whole gradient is there, for it is clipped, or dropped, as a whole, or made of several
            backward passes.
    """

    def __init__(
        self,
        gradient: Travels,
        pushed: Travels,
        model: FlatModel,
        bounds: Sequence[tuple[int, int]],
        exchange: Exchanges,
        *,
        held: bool,
    ) -> None:
        self.samples = 0
        self._gradient = gradient
        self._pushed = pushed
        self._held = held
        self._exchange = exchange
        self._passing = False
        self._seq, self._loss = 0, 0.0
        self._needed = [False] * len(bounds)
        self._unseen: set[int] = set()
        """Slices that no module of the forward pass asked for."""
        self._left = [False] * len(bounds)
        self._missing: list[set[str]] = [set() for _ in bounds]
        """Parameters of each slice whose gradients are still to come."""
        self._names: list[set[str]] = [set() for _ in bounds]
        slices_of = dict[nn.Parameter, list[int]]()
        for name, parameter, shards in _within(model.module, bounds):
            slices_of[parameter] = shards
            for shard in shards:
                self._names[shard].add(name)
            parameter.register_post_accumulate_grad_hook(self._accumulated(shards, name))  # type: ignore[no-untyped-call]
        for module, entered in _entrances(model.module, slices_of, lambda: gradient.single.forward(0)).items():
            # First of its hooks: others may make its weights of the parameters, as torch.nn.utils.weight_norm does.
            module.register_forward_pre_hook(self._entered(sorted(entered)), prepend=True)

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`, which was prepared; returns the loss.

        Raises what `exchange` raises; ConfigError for a model whose layers do not show when they are used.
        """
        slices = range(len(self._needed))
        self._seq = seq
        self._needed = [False for _ in slices]
        self._left = [False for _ in slices]
        self._missing = [set(names) for names in self._names]
        self._passing = True
        self._unseen = set()
        try:
            if self._held:
                self._loss = self._pushed.finish(self._gradient.compute(seq))
                self.samples = self._gradient.samples
                self._need_the_others()
            else:
                self._passes(seq)
        finally:
            self._passing = False
        for shard in reversed(slices):
            if not self._left[shard]:
                self._leave(shard)
        return self._loss

    def _passes(self, seq: int) -> None:
        """Both passes, between which the slices are asked for that no module has."""
        gradient: Gradient = self._gradient.single
        loss = gradient.forward(seq)
        self._loss, self.samples = loss.item(), gradient.samples
        self._need_the_others()
        loss.backward()  # type: ignore[no-untyped-call]

    def _need_the_others(self) -> None:
        self._unseen = {shard for shard, needed in enumerate(self._needed) if not needed}
        for shard in self._unseen:
            self._exchange.need(shard)

    def _entered(self, shards: list[int]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._passing:
                for shard in shards:
                    if not self._needed[shard]:
                        self._needed[shard] = True
                        self._exchange.need(shard)

        return hook

    def _accumulated(self, shards: Sequence[int], name: str) -> Callable[[object], None]:
        def hook(_: object) -> None:
            if not self._passing:
                return
            for shard in reversed(shards):
                unseen = shard in self._unseen or not self._needed[shard]
                if unseen or self._left[shard]:
                    why = "its weights were used before its module was called" if unseen else "its gradient came in parts"
                    raise ConfigError(f"exchange = 'layerwise': expected 'whole' for this model: {why}: parameter {name}")
                self._missing[shard].discard(name)
                if not self._missing[shard] and not self._held:
                    self._leave(shard)

        return hook

    def _leave(self, shard: int) -> None:
        self._left[shard] = True
        if not self._held:
            self._pushed.finish_slice(shard)
        self._exchange.leave(shard, self._seq, self.samples, self._loss, self._pushed.rounded_of(shard), self._pushed.scaled.by)


class BucketedGradient(Computes):
    """Computes the mini-batches of `gradient`, on the CPU, and tells `exchange` which bucket is left.

    Args:
        gradient: of `model`.
        pushed: `gradient`, or what is pushed of it.
        held: no bucket is left before the whole gradient is there, for it is clipped, or dropped, as a whole, or made of several
            backward passes.
        own: the place of this rank: its own buckets, which go nowhere, are left when all others are.
    """

    def __init__(
        self,
        gradient: Travels,
        pushed: Travels,
        model: FlatModel,
        buckets: Sequence[Bucket],
        exchange: Exchanges,
        *,
        held: bool,
        own: int,
    ) -> None:
        self.samples = 0
        self._stays = [bucket.owner == own for bucket in buckets]
        self.waited, self.scaled = pushed.waited, pushed.scaled
        self._gradient = gradient
        self._pushed = pushed
        self._exchange = exchange
        self._held = held
        self._passing = False
        self._seq = 0
        self._left = [False for _ in buckets]
        self._names: list[set[str]] = [set() for _ in buckets]
        self._missing: list[set[str]] = [set() for _ in buckets]
        """Parameters of each bucket whose gradients are still to come."""
        for name, parameter, has in _within(model.module, [(bucket.start, bucket.end) for bucket in buckets]):
            for number in has:
                self._names[number].add(name)
            parameter.register_post_accumulate_grad_hook(self._accumulated(has, name))  # type: ignore[no-untyped-call]

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`, which was prepared; returns the loss. Raises what `exchange` raises; ConfigError for a
        model whose gradients come in parts."""
        numbers = range(len(self._left))
        self._seq = seq
        self._left = [False for _ in numbers]
        self._missing = [set(names) for names in self._names]
        self._passing = not self._held
        try:
            loss = self._gradient.compute(seq)
        finally:
            self._passing = False
        self.samples = self._gradient.samples
        if self._held:
            loss = self._pushed.finish(loss)
        for number in sorted(reversed(numbers), key=self._stays.__getitem__):
            if not self._left[number]:
                self._leave(number)
        self.rounded = self._pushed.rounded
        return loss

    def _accumulated(self, buckets: Sequence[int], name: str) -> Callable[[object], None]:
        def hook(_: object) -> None:
            if not self._passing:
                return
            for number in buckets:
                if self._left[number]:
                    raise ConfigError(
                        "exchange = 'layerwise': expected 'whole' for this model: its gradient came in parts: parameter " + name
                    )
                self._missing[number].discard(name)
                if not (self._missing[number] or self._stays[number]):
                    self._leave(number)

        return hook

    def _leave(self, number: int) -> None:
        self._left[number] = True
        if not self._held:
            self._pushed.finish_slice(number)
        self._exchange.leave(number, self._seq, self.samples, 0.0, 0.0, 1.0)


def _within(model: nn.Module, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[str, nn.Parameter, list[int]]]:
    """Each trainable parameter, and the numbers of those parts of the flat vector that have some of it."""
    offset = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            start, offset = offset, offset + parameter.numel()
            yield name, parameter, [number for number, (begin, end) in enumerate(bounds) if begin < offset and start < end]


def _entrances(
    model: nn.Module, slices_of: dict[nn.Parameter, list[int]], forward: Callable[[], object]
) -> dict[nn.Module, set[int]]:
    """The modules at whose entrance slices are needed, and which; `forward` is called once, and leaves the model as it is."""
    entered: set[nn.Module] = set()
    handles = [module.register_forward_pre_hook(lambda each, _: entered.add(each)) for module in model.modules()]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        forward()
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    for handle in handles:
        handle.remove()
    found: dict[nn.Module, set[int]] = {}
    for name, module in model.named_modules():
        shards = {shard for parameter in module.parameters(recurse=False) for shard in slices_of.get(parameter, ())}
        around = name
        while shards and module not in entered and around:
            around = around.rpartition(".")[0]
            module = model.get_submodule(around)  # noqa: PLW2901
        if shards:
            found.setdefault(module, set()).update(shards)
    return found
