"""Synchronous SGD with a time-out [Chen16 6]: N gradients make an update, or after a while those that are there.

Until the time-out this is backup with N wanted gradients. After it N_min are enough, at once or as soon as they have come; what
comes later is dropped. The divisor is what came (law 3). Each shard looks at its own watch, and tells its protocol when the
time is over: a learner whose gradient one shard applied and another dropped goes on like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpisgd.base.checks import at_least, require
from mpisgd.protocols.backup import Backup
from mpisgd.rules.options import ProtocolOptions, check_at_most


@dataclass(frozen=True)
class TimeoutOptions(ProtocolOptions):
    """timeout: N gradients make one update, or after a time-out those that are there, at least N_min [Chen16 6]."""

    N: int | None = None
    """Make an update of this many gradients; default: lambda."""
    N_min: int = 1
    """Make it of this many once the time is over, 1 <= N_min <= N."""
    timeout_s: float = 1.0
    """Seconds from the previous update (or the start) to the time-out."""

    def __post_init__(self) -> None:
        at_least(self, "protocol.", N=1, N_min=1, timeout_s=0)
        if self.N is not None:
            require(self.N_min <= self.N, "protocol.N_min", self.N_min, f"at most protocol.N = {self.N}")

    @property
    def fresh(self) -> bool:
        return True

    @property
    def teams(self) -> bool:
        return True

    @property
    def deadline_s(self) -> float:
        return self.timeout_s

    def make(self, lambda_: int) -> Timeout:
        check_at_most(lambda_, N=self.N, N_min=self.N_min)
        return Timeout(lambda_, self.N or lambda_, self.N_min)

    def among(self, lambda_: int, learners: int) -> TimeoutOptions:
        """As many gradients are waited for, where there are as many learners."""
        wanted = None if self.N is None else min(self.N, learners)
        return replace(self, N=wanted, N_min=min(self.N_min, learners))


class Timeout(Backup):
    def __init__(self, lambda_: int, wanted: int, least: int) -> None:
        super().__init__(lambda_, wanted)
        self.least = least
        self.is_over = False

    def on_timeout(self) -> None:
        self.is_over = True

    def update_due(self) -> bool:
        return (self.is_over and self.summed >= self.least) or super().update_due()

    def on_update(self) -> None:
        super().on_update()
        self.is_over = False
