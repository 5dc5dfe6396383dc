"""The forward and the backward pass of a virtual learner, layer by layer, in virtual time.

A mini-batch takes as long as its cost model says: a third of it forward, two thirds backward, for the backward pass has two
products of matrices where the forward pass has one; in each pass every layer takes the same. The layers are reached in the order
of the vector, and left in the reverse; of a layer in several slices all are.

Where there are tensors, the gradient is computed at once, when its first slice is left: virtual ranks are greenlets and share one
model, so they must not wait for each other in the middle of an autograd pass. The numbers are the same: a gradient depends on the
weights of all slices, whenever they came. So what hooks do on a real rank, a plain loop does here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpisgd.vectors.computing import Computes, Exchanges, Travels


class Works(Protocol):
    """A rank, on whose clock nanoseconds pass."""

    def work(self, nanoseconds: int) -> None: ...


class Passes(Computes):
    """A learner's forward and backward passes, layer by layer.

    Args:
        gradient: computes, and rounds, in no virtual time.
        rank: the learner's.
        next_ns: how many its next mini-batch takes.
        firsts: the number of the first layer of each slice, or bucket.
        layers: how many there are, which take as long each.
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
        layers: int,
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
        self._layers = layers
        self._held = held
        self._count = count

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`; returns the loss. Raises what `exchange` raises."""
        gradient, exchange, firsts, layers = self._gradient, self._exchange, self._firsts, self._layers
        ns, done = self._next_ns(), 0
        for shard, first in enumerate(firsts):
            self._work(ns, done, first)
            done = first
            exchange.need(shard)
        self._work(ns, done, layers)
        done = layers
        gradient.begin(seq)
        last, loss = len(firsts) - 1, 0.0
        if self._held:
            self._work(ns, done, 3 * layers)
            for _ in range(1, self._count):
                self._rank.work(self._next_ns())
        for shard in range(last, -1, -1):
            if not self._held:
                end = layers + 2 * (layers - firsts[shard])
                self._work(ns, done, end)
                done = end
            if shard == last:
                loss, self.samples, self.rounded = gradient.compute(seq), gradient.samples, gradient.rounded
                self.skipped = gradient.skipped
            exchange.leave(shard, seq, self.samples, loss, gradient.rounded_of(shard), gradient.scaled.by, self.skipped)
        return loss

    def _work(self, ns: int, start: int, end: int) -> None:
        """Some thirds of layers of a mini-batch of so many nanoseconds, which all together take."""
        all_ = 3 * self._layers
        self._rank.work(ns * end // all_ - ns * start // all_)
