"""All that a shard writes of a run: it is told, and never asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.schema import Event
from mpisgd.records.log.writer import ShardLog
from mpisgd.rules.rules import Rules
from mpisgd.vectors.computing import Copied


class ShardRecords:
    """The log, the progress, the snapshots and the checkpoints of one shard.

    Args:
        snapshots: where copies of the weights for evaluation go.
        checkpoints: where copies of the slice go, from which the run can be continued; None = nowhere.

    Attributes:
        carried: pushes that were received before the checkpoint that this run continues from.
        saved_clock: of the last checkpoint that was taken, or that this run continues from; -1 = there is none.
    """

    def __init__(self, log: ShardLog, progress: Progress, snapshots: Snapshots, checkpoints: Checkpoints | None = None) -> None:
        self.log = log
        self.progress = progress
        self.snapshots = snapshots
        self.checkpoints = checkpoints
        self.carried = 0
        self.saved_clock = -1
        self._mark: dict[str, Any] = {}
        self._dropped_seq: list[int] = []
        self._snapshots = 0

    @property
    def marked_clock(self) -> int:
        """From which the run could go on, if it were saved now."""
        return int(self._mark["clock"])

    def take_snapshot(self, update: Copied, clock: int, now_s: float) -> None:
        self.snapshots.take(update, clock, now_s)
        self.log.event(Event.SNAPSHOT, clock, now_s)

    def mark(self, rules: Rules, now_s: float, received: int, diverged: bool) -> None:
        """Just after an update, or before the first: the run can go on from here. `received`: pushes that this log has.

        Weights and optimiser do not change until the next update. So a checkpoint that is written later, when a signal has
        interrupted the run, is one of this moment: gradients that came since, to a sum that will not be finished, are computed
        again.
        """
        self._mark = {
            "clock": rules.clock,
            "now_s": now_s,
            "received": self.carried + received,
            "applied_seq": list(rules.applied_seq),
            "rows": self.log.rows(),
            "diverged": diverged,
            "portions": [] if rules.portions is None else rules.portions.state(),
        }
        self._dropped_seq, self._snapshots = list(rules.dropped_seq), self.snapshots.count

    def due(self, rules: Rules) -> bool:
        return self.checkpoints is not None and not rules.finished and self.checkpoints.due(rules.clock)

    def save(self, now: Callable[[], float], last: bool = False) -> None:
        """Begin to write a checkpoint of the last update; `last`: there will be no other.

        It is complete when all shards have done so at this clock.
        """
        checkpoints, mark, start_s = self.checkpoints, self._mark, now()
        assert checkpoints is not None
        if checkpoints.busy():
            self.log.event(Event.SKIPPED, mark["clock"], start_s)
            return
        self.log.flush()
        if last or checkpoints.lasts(mark["clock"]):
            self.saved_clock = mark["clock"]
        self._note_unsaved(checkpoints, now)
        next_seq = [1 + max(seqs) for seqs in zip(mark["applied_seq"], self._dropped_seq, strict=True)]
        taken = self.snapshots.taken[: self._snapshots]
        checkpoints.take(**mark, next_seq=next_seq, snapshots=taken, last=last)
        end_s = now()
        self.log.event(Event.CHECKPOINT, mark["clock"], end_s, value=end_s - start_s)

    def end(self, now: Callable[[], float]) -> None:
        """No other is taken: wait until the last one is written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._note_unsaved(self.checkpoints, now)

    def _note_unsaved(self, checkpoints: Checkpoints, now: Callable[[], float]) -> None:
        for lost in checkpoints.lost():
            self.log.event(Event.UNSAVED, self._mark["clock"], now(), value=lost)
