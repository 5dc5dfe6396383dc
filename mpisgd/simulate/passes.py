"""The forward and the backward pass of a virtual learner, layer by layer, in virtual time.

A mini-batch takes as long as its cost model says, each layer its share as it was measured (`virtual.forward_s`, `backward_s`).
Without measurements a third is forward, two thirds backward, for the backward pass has two products of matrices where the forward
pass has one; in each pass every layer takes the same. The layers are reached in the order of the vector, and left in the reverse;
of a layer in several slices all are.

Where there are tensors, the gradient is computed at once, when its first slice is left: virtual ranks are greenlets and share one
model, so they must not wait for each other in the middle of an autograd pass. The numbers are the same: a gradient depends on the
weights of all slices, whenever they came. So what hooks do on a real rank, a plain loop does here.
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
    """A rank, on whose clock nanoseconds pass."""

    def work(self, nanoseconds: int) -> None: ...


class Shares(NamedTuple):
    """Shares of a mini-batch's seconds that each layer takes, forward and backward; whole numbers of any unit."""

    forward: Sequence[int]
    backward: Sequence[int]

    @classmethod
    def of(cls, options: VirtualOptions, layers: Sequence[Layer]) -> Shares:
        """Raises ConfigError where other layers than these were measured."""
        if not options.forward_s:
            return cls([1] * len(layers), [2] * len(layers))
        names = [layer.name for layer in layers]
        if [*options.forward_s] != names:
            found = ", ".join(options.forward_s)
            raise ConfigError(f"virtual.forward_s = {found}: expected the layers of the model, in order: {', '.join(names)}")
        return cls(*([round(1e9 * each) for each in table.values()] for table in (options.forward_s, options.backward_s)))


class Passes(Computes):
    """A learner's forward and backward passes, layer by layer.

    Args:
        gradient: computes, and rounds, in no virtual time.
        rank: the learner's.
        next_ns: how many its next mini-batch takes.
        firsts: the number of the first layer of each slice, or bucket.
        shares: of the layers.
        exchange: told which slice, or bucket, is needed, and which is left.
        held: no slice is left before the last backward pass has ended.
        count: mini-batches that are one gradient.
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
        """Share of a mini-batch that is over when the forward pass comes to each layer, and to its end."""
        whole = self._reached[-1] + sum(shares.backward)
        self._left = [whole - each for each in accumulate(shares.backward, initial=0)]
        """Share that is over when the backward pass leaves each layer; the last: when it begins."""
        self._held = held
        self._count = count

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`; returns the loss. Raises what `exchange` raises."""
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
                done = self._work(ns, done, self._left[firsts[shard]])
            if shard == last:
                loss, self.samples, self.rounded = gradient.compute(seq), gradient.samples, gradient.rounded
                self.skipped = gradient.skipped
            exchange.leave(shard, seq, self.samples, loss, gradient.rounded_of(shard), gradient.scaled.by, self.skipped)
        return loss

    def _work(self, ns: int, start: int, end: int) -> int:
        """Let pass what lies between, of a mini-batch of so many nanoseconds in all; returns `end`."""
        whole = self._left[0]
        self._rank.work(ns * end // whole - ns * start // whole)
        return end
