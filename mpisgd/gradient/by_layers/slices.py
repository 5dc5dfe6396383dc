"""A mini-batch's gradient whose slices are exchanged one by one, as forward and backward pass reach and leave their layers.

Weights are asked for when the forward pass comes to the first module that uses some of a slice (`entrances.py`); a gradient is told
when the backward pass has accumulated the last parameter of its slice. So the order is that of the passes, whatever that of the
vector: layers may be tied, entered often, out of order, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.gradient.by_layers.entrances import Entrances, refused, within
from mpisgd.gradient.gradient import Gradient
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
        self._left = [False] * len(bounds)
        self._missing: list[set[str]] = [set() for _ in bounds]
        """Parameters of each slice whose gradients are still to come."""
        self._names: list[set[str]] = [set() for _ in bounds]
        for name, parameter, shards in within(model.module, bounds):
            for shard in shards:
                self._names[shard].add(name)
            parameter.register_post_accumulate_grad_hook(self._accumulated(shards, name))  # type: ignore[no-untyped-call]
        self._entrances = Entrances(model, bounds, lambda: gradient.single.forward(0), exchange.need)

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`, which was prepared; returns the loss.

        Raises what `exchange` raises; ConfigError for a model whose layers do not show when they are used.
        """
        slices = range(len(self._left))
        self._seq = seq
        self._left = [False for _ in slices]
        self._missing = [set(names) for names in self._names]
        self._passing = True
        try:
            self._entrances.begin()
            if self._held:
                self._loss = self._pushed.finish(self._gradient.compute(seq))
                self.samples = self._gradient.samples
                self._entrances.need_the_others()
            else:
                self._passes(seq)
        finally:
            self._passing = False
            self._entrances.end()
        for shard in reversed(slices):
            if not self._left[shard]:
                self._leave(shard)
        return self._loss

    def _passes(self, seq: int) -> None:
        """Both passes, between which the slices are asked for that no module has."""
        gradient: Gradient = self._gradient.single
        loss = gradient.forward(seq)
        self._loss, self.samples = loss.item(), gradient.samples
        self._entrances.need_the_others()
        loss.backward()  # type: ignore[no-untyped-call]

    def _accumulated(self, shards: Sequence[int], name: str) -> Callable[[object], None]:
        def hook(_: object) -> None:
            if not self._passing:
                return
            for shard in reversed(shards):
                unseen = shard in self._entrances.unseen or not self._entrances.needed[shard]
                if unseen or self._left[shard]:
                    raise refused(name, unseen=unseen)
                self._missing[shard].discard(name)
                if not self._missing[shard] and not self._held:
                    self._leave(shard)

        return hook

    def _leave(self, shard: int) -> None:
        self._left[shard] = True
        if not self._held:
            self._pushed.finish_slice(shard)
        self._exchange.leave(shard, self._seq, self.samples, self._loss, self._pushed.rounded_of(shard), self._pushed.scaled.by)
