"""Admission of learners: a single learner first, the others later, at once or evenly over a ramp.

Warm start: [Dean12 4.1]. Ramp: [Chen16 2.1]; staleness grows to about k - 1 with k learners at work.
"""

from __future__ import annotations

from collections.abc import Collection


class Admission:
    """A single learner until update `warm_up`; the others join evenly over `ramp` updates."""

    def __init__(self, lambda_: int, warm_up: int, ramp: int) -> None:
        self._lambda = lambda_
        self._warm_up = warm_up
        self._ramp = ramp

    def admitted(self, clock: int) -> int:
        since = clock - self._warm_up
        if since < 0:
            return 1
        return self._lambda if since >= self._ramp else 1 + (self._lambda - 1) * since // self._ramp

    def admits(self, learner_id: int, clock: int, present: Collection[int]) -> bool:
        """Return whether a learner may work; present learners with the lowest numbers come first."""
        allowed = self.admitted(clock)
        return allowed >= self._lambda or sum(other < learner_id for other in present) < allowed
