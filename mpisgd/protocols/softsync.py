"""n-softsync [Zhang16 2.2, eq. 2, 3]: any c = floor(lambda/n) gradients, of any learners, make one update.

    theta(t+1) = theta(t) - (1/c) * sum over the c gradients i of alpha(tau_i) * g_i
    alpha(tau) = alpha0 / tau,  alpha0 at tau = 0      (modulation "inverse"; each gradient by its own staleness)
    alpha(tau) = alpha0                                (modulation "none")

Nobody waits for anybody: a pull is answered at once, with whatever clock the shard has. n = lambda makes every gradient an
update; with modulation "none" that is Async-Opt [Chen16 Alg. 1, 2] and, with Adagrad, Downpour's server [Dean12 4.1].
"""

from __future__ import annotations

import functools

from mpisgd.protocols.base import Protocol
from mpisgd.protocols.verdict import APPLY, Kind, Verdict


@functools.cache
def modulated(staleness: int) -> Verdict:
    """alpha0 / tau of alpha0: made once for each staleness that comes up."""
    return Verdict(Kind.APPLY, weight=1.0 / staleness)


class Softsync(Protocol):
    consistent = False

    def __init__(self, lambda_: int, n: int, modulated: bool) -> None:
        super().__init__(lambda_)
        self.n = n
        self.modulated = modulated
        self.gradients_per_update = lambda_ // n
        self.summed = 0

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        self.summed += 1
        staleness = clock - timestamp
        return modulated(staleness) if self.modulated and staleness > 0 else APPLY

    def update_due(self) -> bool:
        return self.summed >= self.gradients_per_update

    def on_update(self) -> None:
        self.summed = 0

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        self.gradients_per_update = max(1, len(self.present) // self.n)

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp
