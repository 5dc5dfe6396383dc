"""Backup workers: of N + b learners, the first N gradients make an update, late gradients are dropped [Chen16 Alg. 3, 4].

Algorithm 4, update t: gather N gradients of timestamp t, drop older ones; theta(t+1) = theta(t) - gamma_t * (1/N) * sum.
Algorithm 3, the learner: wait for newer weights, on one clock over all shards, and compute. Applied staleness is 0; a straggler
costs only its own gradient.

With `late = "apply"` a late gradient joins the next sum, weighted by its staleness: the divisor counts it (law 3), N does not.

Without `abort` a learner late once begins later than the others and is late again: its data never count.

Where fewer than N learners are left, all of them are awaited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mpisgd.base.checks import at_least, require
from mpisgd.base.errors import ConfigError
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions, check_at_most, check_modulation
from mpisgd.rules.verdict import APPLY, DROP_STALE, Verdict


@dataclass(frozen=True)
class BackupOptions(ProtocolOptions):
    """backup: the first N gradients of N + b learners make an update, late gradients are dropped [Chen16 Alg. 3, 4]."""

    N: int | None = None
    """Make an update of this many gradients; default: lambda - b [Chen16 3]."""
    b: int | None = None
    """Number of backup learners; default: lambda - N, or 1 without N [Chen16 3]."""
    late: Literal["drop", "apply"] = "drop"
    """Drop late gradients [Chen16 Alg. 4], or apply them with the next update. Late gradients do not count in N."""
    abort: bool = False
    """Tell learners still computing at an update to begin their mini-batch anew."""
    modulation: str = "inverse"
    """Weight late gradients where applied, as in softsync."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", N=1, b=0)
        expected = 'False, or late = "drop": a learner that gives up has no late gradient'
        require(not (self.abort and self.late == "apply"), "protocol.abort", self.abort, expected)

    @property
    def fresh(self) -> bool:
        return self.late == "drop"

    @property
    def aborts(self) -> bool:
        return self.abort

    @property
    def teams(self) -> bool:
        return self.late == "drop" and not self.abort

    def make(self, lambda_: int) -> Backup:
        late = Modulation(self.modulation) if self.late == "apply" else None
        return Backup(lambda_, self.wanted(lambda_), late, self.abort)

    def wanted(self, lambda_: int) -> int:
        """Return N of [Chen16]: as given, or lambda - b. Raises ConfigError unless N + b = lambda and 1 <= N <= lambda."""
        if self.N is not None:
            check_at_most(lambda_, N=self.N)
            if self.b is not None and self.N + self.b != lambda_:
                raise ConfigError(
                    f"protocol.N + protocol.b = {self.N} + {self.b} = {self.N + self.b}: expected lambda = {lambda_} learners"
                )
            return self.N
        backups = 1 if self.b is None else self.b
        if backups >= lambda_:
            raise ConfigError(f"protocol.b = {backups}: expected N = lambda - b = {lambda_} - {backups} >= 1")
        return lambda_ - backups

    def among(self, lambda_: int, learners: int) -> BackupOptions:
        share = 1 - self.wanted(lambda_) / lambda_
        return replace(self, N=None, b=min(round(share * learners), learners - 1))


class Backup(Protocol):
    consistent = True

    def __init__(self, lambda_: int, wanted: int, late: Modulation | None = None, abort: bool = False) -> None:
        super().__init__(lambda_)
        self.late = late
        self.aborts = abort
        self.fresh = late is None
        self.gradients_per_update = wanted
        self.summed = 0
        self.heard: set[int] = set()

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        if timestamp < clock:
            return DROP_STALE if self.late is None else self.late.applied(timestamp, clock)
        self.heard.add(learner_id)
        self.summed += 1
        return APPLY

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:
        if timestamp == clock:  # else the gradient for this update is still to come
            self.heard.add(learner_id)

    def update_due(self) -> bool:
        everybody = bool(self.heard) and self.heard >= self.present
        return self.summed >= self.gradients_per_update or everybody

    def on_update(self) -> None:
        self.summed = 0
        self.heard.clear()

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp + 1
