"""Coordinator: unmodified `torch.optim.LBFGS` on vectors that lie on shards; learners evaluate [Dean12 4.2].

    direction     commands to the shards (`remote.py`)
    line search   torch's; each trial calls `_evaluated`
    evaluation    by learners (`evaluations.py`)

A rank without weights or data. Law 2 is given up here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from mpisgd.base.errors import DivergenceError
from mpisgd.comm.messages import Ending, Op
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.log.schema import Why
from mpisgd.sandblaster.remote import Commands, RemoteVector, Slot, Store
from mpisgd.sandblaster.state import Held, held, restored


class Channel(Commands, Protocol):
    """Channel to shards."""

    def now_s(self) -> float: ...

    def finish(self, ending: Ending) -> None:
        """End the commands."""

    def fail(self) -> None:
        """End the commands at once."""


class Interrupted(Exception):
    """Raised after a signal."""


class Saves(Protocol):
    """Checkpoints (`records/coordinator_records.py`)."""

    def rows(self) -> list[list[int]]:
        """Return the log so far."""

    def due(self, before: int, clock: int) -> bool:
        """Return whether a checkpoint has become due after clock `before`."""

    def write(self, numbers: dict[str, Any]) -> bool:
        """Write; return whether this succeeded."""


class Evaluates(Protocol):
    """Evaluations by learners (`evaluations.py`), or a replay (`replayed_slots.py`)."""

    clock: int
    seconds: float

    def evaluate(self, point: Slot, out: int, step: float) -> tuple[float, float]:
        """Return the mean loss at a point, and the squared norm of the gradient, put into slot `out`.

        Raises Interrupted.
        """

    def end(self, ending: Ending) -> None:
        """End the evaluations."""


class Coordinator:
    """L-BFGS.

    Args:
        log: takes rows of `iterations`.
        on_iteration: takes iteration, loss, greatest element of the gradient, evaluations, seconds.
        warn: takes warnings for people.
        begun: numbers of a checkpoint to go on from; the shards have its slots.
    """

    def __init__(  # noqa: PLR0913 - each by name
        self,
        channel: Channel,
        evaluations: Evaluates,
        options: SandblasterOptions,
        elements: int,
        log: Callable[..., None],
        *,
        on_iteration: Callable[[int, float, float, int, float], None],
        warn: Callable[[str], None],
        saves: Saves | None = None,
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        self.evaluations = evaluations
        self._channel = channel
        self._options = options
        self._log = log
        self._on_iteration = on_iteration
        self._warn = warn
        self._saves = saves
        self._begun: Mapping[str, Any] = begun or {"iteration": 0, "slots": 1, "state": {}}
        slots: int = self._begun["slots"]
        self._store = Store(channel, elements, first=slots)
        self._slots = [Slot(self._store, place) for place in range(slots)]
        self._weights = RemoteVector(self._slots[0])
        self._weights.moved = self._moved
        self._iteration: int = self._begun["iteration"]
        self._saved = evaluations.clock
        self._held: Held | None = None
        """State of the last iteration; a later signal goes back to it."""
        self._since = (0.0, 0.0, 0)
        """Start of the iteration; seconds and number of evaluations before."""
        self._known: dict[Any, tuple[float, weakref.ref[Slot]]] = {}
        """Points of this step by origin: the loss, and the gradient while torch keeps it."""
        self._kept: Slot | None = None
        """Gradient at the weights, where known: torch forgets it between steps, and asks again."""

    def run(self) -> None:
        """Step until convergence, a failed search, the last iteration or a signal.

        After a signal the last iteration is saved; later work is done again when the run goes on.
        """
        options, channel = self._options, self._channel
        search = None if options.line_search == "none" else options.line_search
        optimiser = torch.optim.LBFGS(
            [self._weights],
            lr=1,
            max_iter=1,
            max_eval=26,  # the present point, and 25 trials
            tolerance_grad=options.tolerance_grad,
            tolerance_change=options.tolerance_change,
            history_size=options.history,
            line_search_fn=search,
        )
        self._since = channel.now_s(), 0.0, self.evaluations.clock
        ending = Ending.FINISHED
        try:
            why, before = Why.GOES_ON, self._begin(optimiser)
            while why is Why.GOES_ON:
                why, before = self._step(optimiser, before)
                if why is Why.GOES_ON:
                    self._hold(optimiser, before)
                    self._save_if_due()
        except Interrupted:
            ending = Ending.INTERRUPTED
            self._save(last=True)
        except BaseException:
            channel.fail()
            raise
        channel.finish(ending)
        self.evaluations.end(ending)

    def _begin(self, optimiser: torch.optim.LBFGS) -> float:
        """Return the loss at the weights, evaluated or of the checkpoint."""
        begun, slots, weights = self._begun, self._slots, self._weights
        self._slots = []
        if begun["state"]:
            optimiser.state[weights].update(restored(begun["state"], slots))
            gradient: RemoteVector = restored({"gradient": begun["gradient"]}, slots)["gradient"]
            weights.grad, self._kept = gradient, gradient.slot
            loss: float = begun["loss"]
            self._known[weights.slot.origin] = (loss, weakref.ref(self._kept))
            self._hold(optimiser, loss)
            return loss
        self._hold(optimiser, math.nan)
        return self._evaluated()

    def _hold(self, optimiser: torch.optim.LBFGS, loss: float) -> None:
        if self._saves is None:
            return
        entries = {"clock": self.evaluations.clock, "iteration": self._iteration, "rows": self._saves.rows()}
        state = optimiser.state.get(self._weights, {})
        self._held = held(self._weights, state, **entries, **({"loss": loss} if state else {}))

    def _save_if_due(self) -> None:
        before, self._saved = self._saved, self.evaluations.clock
        if self._saves is not None and self._saves.due(before, self._saved):
            self._save()

    def _save(self, *, last: bool = False) -> None:
        if self._saves is None or self._held is None:
            return
        numbers, slots = self._held
        if not self._saves.write({**numbers, "slots": len(slots)}):
            return
        for slot in slots:
            self._channel.do(Op.KEEP, a=slot.number)
        self._channel.do(Op.SAVE, a=int(last))

    def _step(self, optimiser: torch.optim.LBFGS, before: float) -> tuple[Why, float]:
        """Iterate, from loss `before`; return why to end, or GOES_ON, and the new loss."""
        evaluations, weights = self.evaluations, self._weights
        origin, (start_s, evaluating_s, clock) = weights.slot.origin, self._since
        self._iteration += 1
        optimiser.step(self._evaluated)  # type: ignore[no-untyped-call]
        state = optimiser.state[weights]
        made = weights.slot.origin != origin
        loss = self._evaluated() if made else before
        gradient = self._greatest(weights.grad)
        step = float(state["t"]) if made else 0.0
        changed = float(state["d"].mul(state["t"]).abs().max()) if made else 0.0
        why = self._why(made, gradient, changed, before, loss)
        self._channel.do(Op.ACCEPT, a=weights.slot.number)
        now_s = self._channel.now_s()
        made_of = evaluations.clock - clock
        if why is Why.LINE_SEARCH:
            self._warn(
                f"the line search of iteration {self._iteration} found no loss below {before:.9g} in {made_of} evaluations: the run"
                " ends here. Near a minimum float32 can do no better; else the loss may jump (a step of --protocol.line-search none"
                " goes on all the same), or begin from weights of another run: --init-from"
            )
        self._log(
            iteration=self._iteration,
            clock=evaluations.clock,
            loss=loss,
            gradient_max=gradient,
            step=step,
            evaluations=made_of,
            history=len(state.get("old_dirs") or ()),
            why=why,
            time_s=now_s,
            evaluating_s=evaluations.seconds - evaluating_s,
            commanding_s=now_s - start_s - (evaluations.seconds - evaluating_s),
        )
        self._since = now_s, evaluations.seconds, evaluations.clock
        self._on_iteration(self._iteration, loss, gradient, evaluations.clock, now_s)
        return why, loss

    def _why(self, made: bool, gradient: float, changed: float, before: float, loss: float) -> Why:
        options = self._options
        if gradient <= options.tolerance_grad:
            return Why.GRADIENT
        if not made:
            return Why.DIRECTION
        if options.line_search != "none" and loss >= before:
            return Why.LINE_SEARCH
        if changed <= options.tolerance_change or abs(loss - before) < options.tolerance_change:
            return Why.CHANGE
        return Why.ITERATIONS if self._iteration == options.iterations else Why.GOES_ON

    def _moved(self, slot: Slot) -> None:
        """Keep the gradient of a new point, where torch still has it."""
        known = self._known.get(slot.origin)
        self._kept = None if known is None else known[1]()

    def _evaluated(self) -> float:
        """Return the loss, and set `grad`, as torch's closure. Raises DivergenceError."""
        weights = self._weights
        known = self._known.get(weights.slot.origin)
        if known is not None and (gradient := known[1]()) is not None:
            self._known = {weights.slot.origin: known}
            weights.grad = RemoteVector(gradient)
            return known[0]
        weights.grad = None
        loss, gradient = self._evaluate(weights)
        self._known[weights.slot.origin] = (loss, weakref.ref(gradient))
        weights.grad = RemoteVector(gradient)
        return loss

    def _evaluate(self, weights: RemoteVector) -> tuple[float, Slot]:
        evaluations, decay = self.evaluations, self._options.weight_decay
        out, origin = self._store.new(), weights.slot.origin
        step = float(origin[3]) if origin[0] is Op.ADD else 0.0
        loss, squared = evaluations.evaluate(weights.slot, out, step)
        gradient = Slot(self._store, out)
        if decay > 0:
            loss += decay / 2 * float(weights.dot(weights))
            gradient = gradient.made(Op.ADD, weights.slot, decay)
        if not (math.isfinite(loss) and math.isfinite(squared)):
            raise DivergenceError(
                f"evaluation {evaluations.clock} (iteration {self._iteration}, step length {step:g}): loss {loss}, squared norm"
                f" of the gradient {squared}: not finite; begin nearer to a minimum (--init-from the run of another protocol), or"
                " add --protocol.weight-decay"
            )
        return loss, gradient

    def _greatest(self, vector: RemoteVector | None) -> float:
        return math.nan if vector is None else float(vector.abs().max())
