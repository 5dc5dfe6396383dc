"""Synchronous SGD by version check: gradients of the present clock are taken, others rejected [ElasticDL].

After a rejection the learner pulls, and computes the *same mini-batch* again: none is skipped. A fast learner may give several
gradients to an update. Each learner leaves after its share: in E epochs every sample is applied exactly E times.

A gradient may come in time on one shard and too late on another. Computed again, it is pushed to all; a shard that has applied it
before only counts the push (`Reason.REPEATED`). So all shards count the same pushes of each clock.

A tolerance k > 0 takes staleness up to k, weighted by `modulation`. Shards then count different pushes, and a learner may compute
on slices of different clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpisgd.base.checks import at_least
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions, check_at_most, check_modulation
from mpisgd.rules.verdict import REJECT, Verdict


@dataclass(frozen=True)
class VersionedOptions(ProtocolOptions):
    """versioned: a gradient of another clock is rejected, its learner computes the same mini-batch again [ElasticDL]."""

    grads_to_wait: int | None = None
    """Make an update of this many gradients, 1 to lambda; default: lambda [ElasticDL]."""
    tolerance: int = 0
    """Take gradients up to this staleness. Above 0 a learner may compute on slices of different clocks."""
    modulation: str = "inverse"
    """Weight stale gradients where taken, as in softsync."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", grads_to_wait=1, tolerance=0)

    @property
    def fresh(self) -> bool:
        return self.tolerance == 0

    @property
    def rejects(self) -> bool:
        return True

    def make(self, lambda_: int) -> Versioned:
        check_at_most(lambda_, grads_to_wait=self.grads_to_wait)
        return Versioned(lambda_, self.grads_to_wait or lambda_, self.tolerance, Modulation(self.modulation))

    def among(self, lambda_: int, learners: int) -> VersionedOptions:
        """Await as many gradients, up to `learners`."""
        return self if self.grads_to_wait is None else replace(self, grads_to_wait=min(self.grads_to_wait, learners))


class Versioned(Protocol):
    exact = True

    def __init__(self, lambda_: int, grads_to_wait: int, tolerance: int, modulation: Modulation) -> None:
        super().__init__(lambda_)
        self.wanted = self.gradients_per_update = grads_to_wait
        self.tolerance = tolerance
        self.consistent = self.fresh = tolerance == 0
        self.modulation = modulation
        self.counted = 0

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        if clock - timestamp > self.tolerance:
            return REJECT
        self.counted += 1
        return self.modulation.applied(timestamp, clock)

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:
        if clock - timestamp <= self.tolerance:
            self.counted += 1

    def update_due(self) -> bool:
        return self.counted >= self.gradients_per_update

    def on_update(self) -> None:
        self.counted = 0

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        self._count_anew()

    def on_return(self, learner_id: int, clock: int) -> None:
        super().on_return(learner_id, clock)
        self._count_anew()

    def _count_anew(self) -> None:
        self.gradients_per_update = max(1, min(self.wanted, len(self.present)))

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp
