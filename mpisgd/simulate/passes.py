"""A virtual learner's forward and backward pass, layer by layer, in virtual time.

Layers take measured shares of a mini-batch (`virtual.forward_s`, `backward_s`). Without measurements, one third is forward, two
thirds backward, equal over layers. Layers are reached in vector order and left in reverse, with their slices.

With tensors, the gradient is computed when its first slice leaves: virtual ranks are greenlets that share a model, and must not
wait for each other in an autograd pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from mpisgd.base.errors import ConfigError
from mpisgd.config.config_virtual import VirtualOptions
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import Layer


class Works(Protocol):
    def work(self, nanoseconds: int) -> None: ...


class Shares(NamedTuple):
    """Layers' shares of a mini-batch, whole numbers of any unit."""

    forward: Sequence[int]
    backward: Sequence[int]

    @classmethod
    def of(cls, options: VirtualOptions, layers: Sequence[Layer]) -> Shares:
        if not options.forward_s:
            return cls([1] * len(layers), [2] * len(layers))
        names = [layer.name for layer in layers]
        if [*options.forward_s] != names:
            found = ", ".join(options.forward_s)
            raise ConfigError(f"virtual.forward_s = {found}: expected the layers of the model, in order: {', '.join(names)}")
        return cls(*([round(1e9 * each) for each in table.values()] for table in (options.forward_s, options.backward_s)))


class Passes(Computes):
    """A learner's passes, layer by layer.

    Args:
        gradient: computes in no virtual time.
        next_ns: cost of the next mini-batch.
        firsts: first layer of each slice, or bucket.
        held: slices leave after the last backward pass.
        count: mini-batches per gradient.
    """

    def __init__(
        self,
        gradient: Travels,
        rank: Works,
        next_ns: Callable[[], int],
        firsts: Sequence[int],
        shares: Shares,
        exchange: Exchanges,
        *,
        held: bool,
        count: int = 1,
    ) -> None:
        self.samples = 0
        self.scaled = gradient.scaled
        self._gradient = gradient
        self._rank = rank
        self._next_ns = next_ns
        self._exchange = exchange
        self._firsts = list(firsts)
        self._reached = list(accumulate(shares.forward, initial=0))
        """Share of a mini-batch before the forward pass reaches each layer, and its end."""
        whole = self._reached[-1] + sum(shares.backward)
        self._left = [whole - each for each in accumulate(shares.backward, initial=0)]
        """Share before the backward pass leaves each layer; last, its begin."""
        self._held = held
        self._count = count

    def compute(self, seq: int) -> float:
        gradient, exchange, firsts = self._gradient, self._exchange, self._firsts
        ns, done = self._next_ns(), 0
        for shard, first in enumerate(firsts):
            done = self._work(ns, done, self._reached[first])
            exchange.need(shard)
        done = self._work(ns, done, self._reached[-1])
        gradient.begin(seq)
        last, loss = len(firsts) - 1, 0.0
        if self._held:
            self._work(ns, done, self._left[0])
            for _ in range(1, self._count):
                self._rank.work(self._next_ns())
        for shard in range(last, -1, -1):
            if not self._held:
                done = self._work(ns, done, self._left[firsts[shard]] if exchange.early else self._left[0])
            if shard == last:
                loss, self.samples, self.rounded = gradient.compute(seq), gradient.samples, gradient.rounded
                self.skipped = gradient.skipped
            if exchange.early:
                exchange.leave(shard, seq, self.samples, loss, gradient.rounded_of(shard), gradient.scaled.by, self.skipped)
        return loss

    def _work(self, ns: int, start: int, end: int) -> int:
        """Pass the time from `start` to `end`, shares of `ns`; return `end`."""
        whole = self._left[0]
        self._rank.work(ns * end // whole - ns * start // whole)
        return end
