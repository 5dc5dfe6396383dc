"""Async-Opt: every gradient is an update, at once [Chen16 Alg. 1, 2; ElasticDL].

Algorithm 1, the learner: read the parameters, compute, send. Algorithm 2: theta(t+1) = theta(t) - gamma_t * g(theta(t - tau)); its
averaged weights, thetabar, are `averaging`.

Only the slowest learner bounds staleness; with equal learners the mean is near lambda - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.base.checks import at_least
from mpisgd.rules.admission import Admission
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions, check_modulation
from mpisgd.rules.verdict import DROP_STALE, Verdict


@dataclass(frozen=True)
class AsyncOptions(ProtocolOptions):
    """async: every gradient is an update, no learner waits [Chen16 Alg. 1, 2; ElasticDL]."""

    duplex = True

    most_staleness: int | None = None
    """Drop gradients of more staleness than this; default: none."""
    modulation: str = "none"
    """Weight stale gradients, as in softsync; Async-Opt of [Chen16] has none."""
    warm_up: int = 0
    """Let a single learner make this many updates before the others join [Dean12 4.1]."""
    ramp: int = 0
    """Let the others join evenly over this many further updates [Chen16 2.1]. Staleness then grows slowly."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", most_staleness=0, warm_up=0, ramp=0)

    def make(self, lambda_: int) -> AsyncOpt:
        admission = Admission(lambda_, self.warm_up, self.ramp)
        return AsyncOpt(lambda_, Modulation(self.modulation), self.most_staleness, admission)


class AsyncOpt(Protocol):
    consistent = False
    gradients_per_update = 1

    def __init__(
        self, lambda_: int, modulation: Modulation, most_staleness: int | None = None, admission: Admission | None = None
    ) -> None:
        super().__init__(lambda_)
        self.modulation = modulation
        self.most_staleness = most_staleness
        self.admission = admission
        self.summed = 0

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        if self.most_staleness is not None and clock - timestamp > self.most_staleness:
            return DROP_STALE
        self.summed = 1
        return self.modulation.applied(timestamp, clock)

    def update_due(self) -> bool:
        return self.summed > 0

    def on_update(self) -> None:
        self.summed = 0

    def may_pull(self, learner_id: int, clock: int) -> bool:
        return self.admission is None or self.admission.admits(learner_id, clock, self.present)

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp
