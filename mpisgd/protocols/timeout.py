"""Synchronous SGD with a time-out: N gradients make an update, or after a while fewer [Chen16 6].

Until the time-out this is backup with N wanted gradients; then N_min are enough, and later gradients are dropped. The divisor is
counted (law 3). Each shard has its own watch: a gradient may be applied on one shard and dropped on another,
and its learner goes on as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpisgd.base.checks import at_least, require
from mpisgd.protocols.backup import Backup
from mpisgd.rules.protocol_options import ProtocolOptions, check_at_most


@dataclass(frozen=True)
class TimeoutOptions(ProtocolOptions):
    """timeout: N gradients make an update, or after a time-out fewer, at least N_min [Chen16 6]."""

    N: int | None = None
    """Make an update of this many gradients; default: lambda."""
    N_min: int = 1
    """Make an update of this many once the time is over, 1 <= N_min <= N."""
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
        """Await as many gradients, up to `learners`."""
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
