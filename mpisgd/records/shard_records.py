"""Records of a shard: told, never asked."""

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
    """Log, progress, snapshots and checkpoints of a shard.

    Attributes:
        carried: pushes received before the checkpoint continued.
        saved_clock: of the last checkpoint taken or continued; -1 = none.
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
        return int(self._mark["clock"])

    def take_snapshot(self, update: Copied, clock: int, now_s: float) -> None:
        self.snapshots.take(update, clock, now_s)
        self.log.event(Event.SNAPSHOT, clock, now_s)

    def mark(self, rules: Rules, now_s: float, received: int, diverged: bool) -> None:
        """Note a state to go on from, after an update or before the first. `received`: pushes in this log.

        Weights stay unchanged until the next update, so a checkpoint after a signal has this state; gradients of the unfinished sum
        are computed again.
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
        """Begin a checkpoint of the last update, complete once all shards have done so at this clock."""
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
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._note_unsaved(self.checkpoints, now)

    def _note_unsaved(self, checkpoints: Checkpoints, now: Callable[[], float]) -> None:
        for lost in checkpoints.lost():
            self.log.event(Event.UNSAVED, self._mark["clock"], now(), value=lost)
