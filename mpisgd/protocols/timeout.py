"""Synchronous SGD with a time-out [Chen16 6]: N gradients make an update, or after a while those that are there.

Until the time-out this is backup with N wanted gradients. After it N_min are enough, at once or as soon as they have come; what
comes later is dropped. The divisor is what came (law 3). Each shard looks at its own watch, and tells its protocol when the
time is over: a learner whose gradient one shard applied and another dropped goes on like any other.
"""

from __future__ import annotations

from mpisgd.protocols.backup import Backup


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
