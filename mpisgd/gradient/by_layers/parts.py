"""A gradient exchanged part by part: a part is a shard's slice, an allreduce's bucket (`vectors/buckets.py`), or a streamed chunk.

A part's weights are requested at the first module to use them (`entrances.py`); the part leaves after its last parameter's
gradient. Layers may be tied, entered often, out of order, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mpisgd.gradient.by_layers.entrances import AllThere, Entrances, refused, within
from mpisgd.gradient.objective import function_of
from mpisgd.vectors.computing import Computes, Exchanges, Travels
from mpisgd.vectors.flat import FlatModel, pass_back
from mpisgd.vectors.kept_state import state_kept
from mpisgd.vectors.memory import wait_for
from mpisgd.vectors.skipped import NOTHING, Runs


class GradientInParts(Computes):
    """Mini-batches of `gradient`; tells `exchange` when parts are needed, and when they leave.

    Args:
        pushed: `gradient`, or the stage after.
        held: parts wait for the whole gradient (`stages.held`).
        own: numbers of parts that stay here; they leave last.
        streamed: weights are in place before a pass. Parts wait in the first mini-batch, and in all, if a gradient comes in pieces.
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
        streamed: bool = False,
    ) -> None:
        self.samples = 0
        self.waited, self.scaled = pushed.waited, pushed.scaled
        self._gradient = gradient
        self._model = model
        self._pushed = pushed
        self._exchange = exchange
        self._parts = [slice(*each) for each in bounds]
        self._apart = None if gradient.memory is model.memory else gradient.memory.tensors
        self._held = held
        self._tried: set[str] | None = set() if streamed else None
        """Parameters with a gradient, while parts wait to see whether each comes once."""
        self._in_pieces = self._passing = False
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

        self._entrances = AllThere(len(bounds)) if streamed else Entrances(model, bounds, forward, self._need)

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
        if not self._held:
            self._model.take_gradients_back()
            self._gradient.single.note_skipped()
        for number in sorted(reversed(range(len(self._left))), key=self._stays.__getitem__) if self._exchange.early else ():
            if not self._left[number]:
                self._leave(number, self._gradient.skipped)
        if not self._in_pieces:
            self._tried = None
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
            if self._tried is not None:
                self._in_pieces |= name in self._tried
                self._tried.add(name)
            if self._tried is not None or not self._exchange.early:
                return
            complete = []
            for number in reversed(numbers):
                unseen = number in self._entrances.unseen or not self._entrances.needed[number]
                if unseen or self._left[number]:
                    raise refused(name, unseen=unseen)
                self._missing[number].discard(name)
                if not (self._held or self._missing[number] or self._stays[number]):
                    complete.append(number)
            if complete:
                self._model.take_gradients_back()
            for number in complete:
                self._leave(number, NOTHING)

        return hook

    def _need(self, number: int) -> None:
        self._exchange.need(number)
        if self._apart is not None:
            part = self._parts[number]
            self._model.weights[part].copy_(self._apart[0][part], non_blocking=True)

    def _leave(self, number: int, skipped: Runs) -> None:
        self._left[number] = True
        if not self._held:
            if self._apart is not None:
                part = self._parts[number]
                self._apart[1][part].copy_(self._model.gradients[part], non_blocking=True)
            wait_for(self._model.gradients)
            self._pushed.finish_slice(number)
        told = self._loss, self._pushed.rounded_of(number), self._pushed.scaled.by, skipped
        self._exchange.leave(number, self._seq, self.samples, *told)
