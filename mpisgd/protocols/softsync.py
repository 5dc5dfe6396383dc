"""n-softsync: any c = floor(lambda/n) gradients, of any learners, make an update [Zhang16 2.2, eq. 2, 3].

    theta(t+1) = theta(t) - (1/c) * sum over the c gradients i of alpha(tau_i) * g_i
    alpha(tau) = alpha0 / tau,  alpha0 at tau = 0      (modulation "inverse"; each gradient by its own staleness)
    alpha(tau) = alpha0                                (modulation "none"); others in `modulation.py`

A pull is answered at once, at any clock. n = lambda makes every gradient an update, as in `async_opt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpisgd.base.checks import at_least
from mpisgd.base.errors import ConfigError
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions, check_modulation
from mpisgd.rules.verdict import Verdict


@dataclass(frozen=True)
class SoftsyncOptions(ProtocolOptions):
    """n-softsync: any c = floor(lambda/n) gradients make an update [Zhang16 2.2, eq. 2, 3]."""

    duplex = True

    n: int = 1
    """Split lambda by n: floor(lambda/n) gradients make an update [Zhang16 2.2]. The mean staleness is near n; 1 <= n <= lambda."""
    modulation: str = "inverse"
    """Weight stale gradients: none, inverse, inverse_plus_one, exponential:B, or your function. At staleness tau: none = 1;
    inverse = 1/tau, 1 at tau = 0 [Zhang16 eq. 3]; inverse_plus_one = 1/(tau + 1); exponential:B = exp(-B tau) (Chan and Lane
    2014); package.module:function of (tau, clock)."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", n=1)

    def make(self, lambda_: int) -> Softsync:
        if self.n > lambda_:
            raise ConfigError(
                f"protocol.n = {self.n}: expected 1 <= n <= lambda = {lambda_} learners, for c = floor(lambda/n) >= 1"
            )
        return Softsync(lambda_, self.n, Modulation(self.modulation))

    def among(self, lambda_: int, learners: int) -> SoftsyncOptions:
        """Keep n, up to `learners`; n = lambda becomes n = `learners`."""
        return replace(self, n=learners if self.n == lambda_ else min(self.n, learners))


class Softsync(Protocol):
    consistent = False

    def __init__(self, lambda_: int, n: int, modulation: Modulation) -> None:
        super().__init__(lambda_)
        self.n = n
        self.modulation = modulation
        self.gradients_per_update = lambda_ // n
        self.summed = 0

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        self.summed += 1
        return self.modulation.applied(timestamp, clock)

    def update_due(self) -> bool:
        return self.summed >= self.gradients_per_update

    def on_update(self) -> None:
        self.summed = 0

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        self._count_anew()

    def on_return(self, learner_id: int, clock: int) -> None:
        super().on_return(learner_id, clock)
        self._count_anew()

    def _count_anew(self) -> None:
        self.gradients_per_update = max(1, len(self.present) // self.n)

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp
