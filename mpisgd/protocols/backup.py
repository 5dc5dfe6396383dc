"""Synchronous SGD with backup workers [Chen16 Alg. 3, 4]: of N + b learners, the first N gradients make the update.

Algorithm 4, for each update t: gather gradients until N of timestamp t are here; the ones of an older timestamp are dropped;
theta(t+1) = theta(t) - gamma_t * (1/N) * sum. Algorithm 3, the learner: wait for weights newer than those of the last
gradient, on one clock over all shards, and compute. Applied staleness is 0, always; a straggler costs its own gradient, and
nobody's time.

With `late = "apply"` a late gradient is not dropped: it goes into the sum in the making, weighted by its staleness, and does not
count towards N. The divisor counts it (law 3).

With `abort` the shard tells the learners that are still computing when an update is done; they give up, and begin the same
mini-batch anew on the new weights. All then begin together: without it, a learner that was late once begins later than the
others, is late again, and none of its data ever counts.

Where learners leave and fewer than N are left, those left are the N.
"""

from __future__ import annotations

from mpisgd.protocols.base import Protocol
from mpisgd.protocols.modulation import Modulation
from mpisgd.protocols.verdict import APPLY, DROP_STALE, Verdict


class Backup(Protocol):
    consistent = True

    def __init__(self, lambda_: int, wanted: int, late: Modulation | None = None, abort: bool = False) -> None:
        """`late`: how late gradients are applied; None = they are dropped. `abort`: late learners give up."""
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
        if timestamp == clock:  # else its gradient for this update is still to come
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
