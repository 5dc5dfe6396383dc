"""Failures of virtual learners: a function of (seed, learner_id) (law 5)."""

from __future__ import annotations

from mpisgd.base.errors import MpisgdError
from mpisgd.base.streams import Domain, stream
from mpisgd.config.config_virtual import FailureOptions


class LearnerFailed(MpisgdError):
    """The end of a virtual learner; its mini-batch under way is lost."""

    def __init__(self, learner_id: int, now_ns: int) -> None:
        super().__init__(f"learner {learner_id} failed at {now_ns / 1e9:g} s of virtual time")
        self.learner_id = learner_id
        self.now_ns = now_ns


class Failures:
    def __init__(self, options: FailureOptions, seed: int) -> None:
        self._options = options
        self._seed = seed

    def nanosecond_of(self, learner_id: int) -> int | None:
        """Return the virtual nanosecond of failure, the earlier of given and drawn; None = never."""
        seconds = []
        if learner_id in self._options.at_s:
            seconds.append(self._options.at_s[learner_id])
        if self._options.mean_s > 0:
            seconds.append(stream(Domain.FAILURE, self._seed, learner_id).exponential(self._options.mean_s))
        return round(min(seconds) * 1e9) if seconds else None
