"""Choice of who evaluates, where learners and the evaluator may be lost: shard 0 decides.

A dedicated evaluator does it while it lives. Otherwise, and after that, it is the first learner that has said goodbye; where that
is lost too, the next. So the weights of a run that has come to its end are evaluated and saved as long as anybody is left; one that
hangs, and that nobody is left to follow, is waited for (`faults.py`).
"""

from __future__ import annotations

DEDICATED = -1
"""Stands for the evaluator that is no learner."""


class Succession:
    """The evaluator, and those who are free to follow.

    Args:
        dedicated: whether there is an evaluator that is no learner.
    """

    def __init__(self, *, dedicated: bool) -> None:
        self.evaluator: int | None = DEDICATED if dedicated else None
        self.free: list[int] = []
        """Learners that have said goodbye, and wait to be told whether they are to evaluate."""
        self.appointed = 0
        """How many were appointed so far."""

    def lost(self, learner_id: int) -> None:
        """A learner, or the DEDICATED evaluator, is there no more."""
        if learner_id == self.evaluator:
            self.evaluator = None
        if learner_id in self.free:
            self.free.remove(learner_id)

    def appoint(self) -> int | None:
        """The learner that is to evaluate from now on; None where somebody does already, or nobody is free."""
        if self.evaluator is not None or not self.free:
            return None
        self.evaluator = min(self.free)
        self.appointed += 1
        self.free.remove(self.evaluator)
        return self.evaluator
