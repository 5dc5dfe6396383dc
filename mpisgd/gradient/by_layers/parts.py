"""A mini-batch's gradient whose parts are exchanged one by one, as forward and backward pass reach and leave their layers.

A part is a shard's slice, or a bucket of an allreduce (`vectors/buckets.py`). Its weights are asked for when the forward pass comes
to the first module that uses some of them (`entrances.py`); it is left when the backward pass has accumulated its last parameter.
So the order is that of the passes, whatever that of the vector: layers may be tied, entered often, out of order, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mpisgd.gradient.by_layers.entrances import Entrances, refused, within
from mpisgd.gradient.objective import function_of
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import FlatModel, pass_back
from mpisgd.vectors.kept_state import state_kept


class GradientInParts(Computes):
    """Computes the mini-batches of `gradient`, on the CPU, and tells `exchange` which part is needed, and which is left.

    Args:
        gradient: of `model`; of several mini-batches, `single` computes each.
        pushed: `gradient`, or what is pushed of it.
        bounds: the parts of the flat vector; a large parameter may be in several.
        held: no part is left before the whole gradient is there, for it is clipped, or dropped, as a whole, or made of several
            backward passes.
        own: the numbers of parts that go nowhere: they are left when all others are.
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
        own: Collection[int] = (),
    ) -> None:
        self.samples = 0
        self.waited, self.scaled = pushed.waited, pushed.scaled
        self._gradient = gradient
        self._model = model
        self._pushed = pushed
        self._exchange = exchange
        self._held = held
        self._passing = False
        self._seq, self._loss = 0, 0.0
        self._stays = [number in own for number in range(len(bounds))]
        self._left = [False for _ in bounds]
        self._names: list[set[str]] = [set() for _ in bounds]
        self._missing: list[set[str]] = [set() for _ in bounds]
        """Parameters of each part whose gradients are still to come."""
        for name, parameter, numbers in within(model.module, bounds):
            for number in numbers:
                self._names[number].add(name)
            parameter.register_post_accumulate_grad_hook(self._accumulated(numbers, name))  # type: ignore[no-untyped-call]

        def forward() -> None:
            with state_kept(model.module, function_of(gradient.single.objective)):
                gradient.single.forward(0)

        self._entrances = Entrances(model, bounds, forward, exchange.need)

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def compute(self, seq: int) -> float:
        """Both passes over mini-batch `seq`, which was prepared; returns the loss.

        Raises what `exchange` raises; ConfigError for a model whose gradients come in parts, or whose layers do not show when they
        are used.
        """
        self._seq = seq
        self._left = [False for _ in self._left]
        self._missing = [set(names) for names in self._names]
        self._passing = self._held  # else from the backward pass on: a step of the user's may compute gradients of its own
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
        for number in sorted(reversed(range(len(self._left))), key=self._stays.__getitem__):
            if not self._left[number]:
                self._leave(number)
        self.rounded, self.skipped = self._pushed.rounded, self._gradient.skipped
        return self._loss

    def _passes(self, seq: int) -> None:
        """Both passes, between which those parts are asked for that no module has."""
        gradient = self._gradient.single
        loss = gradient.forward(seq)
        self._loss, self.samples = loss.item(), gradient.samples
        self._entrances.need_the_others()
        self._passing = True
        pass_back(self._model, loss)

    def _accumulated(self, numbers: Sequence[int], name: str) -> Callable[[object], None]:
        def hook(_: object) -> None:
            if not self._passing:
                return
            for number in reversed(numbers):
                unseen = number in self._entrances.unseen or not self._entrances.needed[number]
                if unseen or self._left[number]:
                    raise refused(name, unseen=unseen)
                self._missing[number].discard(name)
                if not (self._held or self._missing[number] or self._stays[number]):
                    self._leave(number)

        return hook

    def _leave(self, number: int) -> None:
        self._left[number] = True
        if not self._held:
            self._model.take_gradients_back()
            self._pushed.finish_slice(number)
            self._gradient.single.note_skipped()
        told = self._loss, self._pushed.rounded_of(number), self._pushed.scaled.by, self._gradient.skipped
        self._exchange.leave(number, self._seq, self.samples, *told)
