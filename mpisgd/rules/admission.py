"""Admission of learners: one learner alone at first, the others later, all at once or one after the other.

The warm start of [Dean12 4.1] trains with one learner before the rest join. The staleness ramp of [Chen16 2.1] lets staleness
grow over the first epochs: with k learners at work it is about k - 1.
"""

from __future__ import annotations

from collections.abc import Collection


class Admission:
    """Until update `warm_up` one learner is at work; then the others join, evenly over `ramp` updates."""

    def __init__(self, lambda_: int, warm_up: int, ramp: int) -> None:
        self._lambda = lambda_
        self._warm_up = warm_up
        self._ramp = ramp

    def admitted(self, clock: int) -> int:
        """Number of learners that may be at work."""
        since = clock - self._warm_up
        if since < 0:
            return 1
        return self._lambda if since >= self._ramp else 1 + (self._lambda - 1) * since // self._ramp

    def admits(self, learner_id: int, clock: int, present: Collection[int]) -> bool:
        """Whether a learner may work. Those with the lowest numbers come first; where one has left, the next takes its place."""
        allowed = self.admitted(clock)
        return allowed >= self._lambda or sum(other < learner_id for other in present) < allowed
