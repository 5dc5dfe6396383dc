"""Learners that owe a shard something, and since when."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Attendance:
    """A learner that was given weights owes a push, one that has pushed a pull; one whose pull waits owes nothing.

    Args:
        lambda_: number of learners.
        patience_s: how long a learner may owe.
    """

    def __init__(self, lambda_: int, patience_s: float) -> None:
        self.patience_s = patience_s
        self._since_s = [0.0] * lambda_
        self._owes_push = [False] * lambda_
        self.look_s = math.inf
        """Second at which to look again who is overdue."""

    def begin(self, now_s: float) -> None:
        """All owe their first pull."""
        self._since_s = [now_s] * len(self._since_s)
        self.looked(now_s)

    def looked(self, now_s: float) -> None:
        """Overdue ones are noticed a quarter of the patience late, at most."""
        self.look_s = now_s + self.patience_s / 4

    def pushed(self, learner_id: int, now_s: float) -> None:
        """Note that it has pushed, and owes a pull."""
        self._since_s[learner_id] = now_s
        self._owes_push[learner_id] = False

    def given(self, learner_id: int, now_s: float) -> None:
        """Note that it has been given weights, and owes a push."""
        self._since_s[learner_id] = now_s
        self._owes_push[learner_id] = True

    def waits(self, learner_id: int) -> None:
        """Note that it has asked for weights, and waits."""
        self._since_s[learner_id] = math.inf

    def owes_push(self, learner_id: int) -> bool:
        """Whether it has been given weights, and has not pushed since."""
        return self._owes_push[learner_id]

    def silent_s(self, learner_id: int, now_s: float) -> float:
        """Seconds since it was heard of, or given something."""
        return max(0.0, now_s - self._since_s[learner_id])

    def overdue(self, among: Iterable[int], now_s: float) -> list[int]:
        """List those of whom too little has been heard for too long."""
        return [learner_id for learner_id in sorted(among) if now_s - self._since_s[learner_id] > self.patience_s]
