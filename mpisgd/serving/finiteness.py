"""Looks whether what is summed is finite, and does with what is not as `nonfinite` says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NoReturn

from mpisgd.base.errors import DivergenceError
from mpisgd.comm.messages import Push
from mpisgd.records.log.schema import Event
from mpisgd.rules.rules import Rules
from mpisgd.vectors.computing import Updates

DROPS_IN_A_ROW = 20
"""Where gradients that are not finite are dropped, and so many per learner were dropped without one that was not, the run has
diverged: it would never end."""


class Finiteness:
    """Of one shard's gradients and sums.

    Where a gradient that is not finite stops the run anyway, large ones are not looked at one by one: their sum is, while the new
    weights are under way. The pass over the bytes then costs nothing. Weights made from a bad sum reach only learners that are
    about to end.

    Attributes:
        diverged: something that is not finite was summed.
        later: whether sums are checked, and not gradients.
    """

    def __init__(self, rules: Rules, update: Updates, nonfinite: Literal["stop", "drop", "continue"]) -> None:
        self.diverged = False
        self._rules = rules
        self._update = update
        self._nonfinite = nonfinite
        self._most_drops = DROPS_IN_A_ROW * len(rules.present)
        self._drops = 0
        self.later = update.checks_sums = nonfinite == "stop" and not update.cached
        self._summed, self._unchecked = set[int](), set[int]()

    def of(self, push: Push) -> bool:
        """Whether the gradient in `update.scratch` is, and its loss."""
        finite = self.later or self._update.scratch_is_finite()  # whatever the loss: the update keeps what it finds
        if finite and math.isfinite(push.loss):
            self._drops = 0
            return True
        return False

    def uses(self, push: Push, tell: Callable[[Event, int, float], None]) -> bool:
        """It is not, which is told; whether it is summed all the same. Raises DivergenceError where that stops the run."""
        if self._nonfinite == "stop":
            named = f"learner {push.learner_id}, mini-batch {push.seq}, clock {self._rules.clock}, loss {push.loss}"
            if math.isnan(push.loss) and self._update.scratch_is_finite():
                raise DivergenceError(
                    f"{named}: the loss is not finite, its gradient is: are all targets of the mini-batch ignored ones? Expected"
                    " one that counts in each, or nonfinite = 'drop' or 'continue'"
                )
            self._refuse(f"gradient of {named}")
        tell(Event.NONFINITE, push.learner_id, push.loss)
        if self._nonfinite == "continue":
            self.diverged = True
            return True
        self._drops += 1
        if self._drops > self._most_drops:
            self._refuse(f"the last {self._drops} gradients, all dropped, up to mini-batch {push.seq}")
        return False

    def _refuse(self, what: str) -> NoReturn:
        raise DivergenceError(
            f"{what}: not finite; lower alpha0 = {self._update.learning_rate:g}, or set nonfinite to drop or continue"
        )

    def before_sum(self, learner_id: int) -> None:
        """Hear that a gradient of this learner is summed next; to be told where `later`, as `after_update`."""
        self.check()
        self._summed.add(learner_id)

    def after_update(self) -> None:
        """The sum is that of the last update."""
        self._summed, self._unchecked = set(), self._summed

    def check(self) -> None:
        """The sum of the last update, if nobody has looked yet. Raises DivergenceError."""
        if self._unchecked and not self._update.sum_is_finite():
            self._refuse(f"sum of the gradients of learners {sorted(self._unchecked)} that made clock {self._rules.clock}")
        self._unchecked.clear()
