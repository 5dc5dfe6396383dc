"""An allreduce's gradient, which is told bucket by bucket (`vectors/buckets.py`), as `slices.py` tells slices.

What autograd never comes to, because the loss does not depend on it, is told at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.gradient.by_layers.entrances import Entrances, refused, within
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import FlatModel


class BucketedGradient(Computes):
    """Computes the mini-batches of `gradient`, on the CPU, and tells `exchange` which bucket is needed, and which is left.

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
        bounds = [(bucket.start, bucket.end) for bucket in buckets]
        self._entrances = Entrances(model, bounds, lambda: gradient.single.forward(0), exchange.need)
        for name, parameter, has in within(model.module, bounds):
            for number in has:
                self._names[number].add(name)
            parameter.register_post_accumulate_grad_hook(self._accumulated(has, name))  # type: ignore[no-untyped-call]

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`, which was prepared; returns the loss. Raises what `exchange` raises; ConfigError for a
        model whose gradients come in parts, or whose layers do not show when they are used."""
        numbers = range(len(self._left))
        self._seq = seq
        self._left = [False for _ in numbers]
        self._missing = [set(names) for names in self._names]
        self._passing = True
        try:
            self._entrances.begin()
            loss = self._gradient.compute(seq)
        finally:
            self._passing = False
            self._entrances.end()
        self._entrances.need_the_others()
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
                if self._left[number] or not self._entrances.needed[number]:
                    raise refused(name, unseen=not self._left[number])
                self._missing[number].discard(name)
                if not (self._held or self._missing[number] or self._stays[number]):
                    self._leave(number)

        return hook

    def _leave(self, number: int) -> None:
        self._left[number] = True
        if not self._held:
            self._pushed.finish_slice(number)
        self._exchange.leave(number, self._seq, self.samples, 0.0, 0.0, 1.0)
