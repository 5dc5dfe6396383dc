"""Finiteness of summed gradients, and the consequences by `nonfinite`."""

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
"""Successive dropped gradients per learner from which the run has diverged: it would never end."""


class Finiteness:
    """Finiteness of a shard's gradients and sums.

    Where a non-finite gradient stops the run anyway, large gradients are checked by their sum, while the new weights leave. Weights
    of a bad sum reach only learners about to end.

    Attributes:
        diverged: a non-finite gradient was summed.
        later: whether sums are checked instead of gradients.
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
        self._doubtful = self._doubted = ""

    def of(self, push: Push) -> bool:
        """Return whether gradient and loss are finite."""
        finite = self.later or push.body.is_finite()  # whatever the loss: the body keeps the result
        if finite and math.isfinite(push.loss):
            self._drops = 0
            return True
        return False

    def uses(self, push: Push, tell: Callable[[Event, int, float], None]) -> bool:
        """Tell of a non-finite gradient; return whether to sum it. Raises DivergenceError."""
        if self._nonfinite == "stop":
            named = f"learner {push.learner_id}, mini-batch {push.seq}, clock {self._rules.clock}, loss {push.loss}"
            if not push.body.owned:  # in chunks: a wait here for all might be in a circle
                self._doubtful = self._doubtful or named
                return True
            if math.isnan(push.loss) and push.body.is_finite():
                self._refuse_loss(named)
            self._refuse(f"gradient of {named}")
        tell(Event.NONFINITE, push.learner_id, push.loss)
        if self._nonfinite == "continue":
            self.diverged = True
            return True
        self._drops += 1
        if self._drops > self._most_drops:
            self._refuse(f"the last {self._drops} gradients, all dropped, up to mini-batch {push.seq}")
        return False

    def _refuse_loss(self, named: str) -> NoReturn:
        raise DivergenceError(
            f"{named}: the loss is not finite, the gradient is: are all targets of the mini-batch ignored? Expected"
            " a counting target in each mini-batch, or nonfinite = 'drop' or 'continue'"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise DivergenceError(
            f"{what}: not finite; lower alpha0 = {self._update.learning_rate:g}, or set nonfinite to drop or continue"
        )

    def before_sum(self, learner_id: int) -> None:
        self.check()
        self._summed.add(learner_id)

    def after_update(self) -> None:
        self._summed, self._unchecked = set(), self._summed
        self._doubtful, self._doubted = "", self._doubtful

    def check(self) -> None:
        """Check the last update's sum once. Raises DivergenceError."""
        if self._unchecked and not self._update.sum_is_finite():
            self._refuse(f"sum of the gradients of learners {sorted(self._unchecked)} that made clock {self._rules.clock}")
        self._unchecked.clear()
        if self._doubted:
            self._refuse_loss(self._doubted)
