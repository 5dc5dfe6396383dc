"""Where a shard was just after an update: what it then knew besides its tensors, at next to no cost.

Weights and optimiser do not change until the next update. So a checkpoint that is written later, when a signal has interrupted the
run, is one of that moment: gradients that came since, to a sum that will not be finished, are computed again.
"""

from __future__ import annotations


class Mark:
    """Just after an update, or before the first one.

    Args:
        now_s: when it was made.
        received: pushes that are in the log.
        applied_seq: per learner, the last mini-batch that was applied; copied.
        dropped_seq: per learner, the last mini-batch that was dropped; copied.
        rows: of each table of the log, written to disk or not yet.
        snapshots: how many had been taken.
    """

    __slots__ = ("applied_seq", "clock", "diverged", "dropped_seq", "now_s", "received", "rows", "snapshots")

    def __init__(
        self,
        clock: int,
        now_s: float,
        received: int,
        applied_seq: list[int],
        dropped_seq: list[int],
        rows: list[int],
        snapshots: int,
        diverged: bool,
    ) -> None:
        self.clock = clock
        self.now_s = now_s
        self.received = received
        self.applied_seq = list(applied_seq)
        self.dropped_seq = list(dropped_seq)
        self.rows = rows
        self.snapshots = snapshots
        self.diverged = diverged

    @property
    def next_seq(self) -> list[int]:
        """Per learner, the mini-batch that is wanted next."""
        return [1 + max(seqs) for seqs in zip(self.applied_seq, self.dropped_seq, strict=True)]
