"""A gradient exchanged part by part: a part is a shard's slice, or an allreduce's bucket (`vectors/buckets.py`).

A part's weights are requested at the first module to use them (`entrances.py`); the part leaves after its last parameter's
gradient. Layers may be tied, entered often, out of order, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mpisgd.gradient.by_layers.entrances import Entrances, refused, within
from mpisgd.gradient.objective import function_of
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import FlatModel, pass_back
from mpisgd.vectors.kept_state import state_kept


class GradientInParts(Computes):
    """Mini-batches of `gradient`, on the CPU; tells `exchange` when parts are needed, and when they leave.

    Args:
        pushed: `gradient`, or the stage after.
        held: parts wait for the whole gradient (`stages.held`).
        own: numbers of parts that stay here; they leave last.
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
        """Each part's parameters that still lack a gradient."""
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
        """Run both passes; return the loss. Raises the errors of `exchange`."""
        self._seq = seq
        self._left = [False for _ in self._left]
        self._missing = [set(names) for names in self._names]
        self._passing = self._held  # else set before the backward pass: a user's step may compute gradients of its own
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
