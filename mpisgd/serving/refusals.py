"""Messages refused by a shard as impossible: from a bug, or a foreign program.

They are dropped and logged; the run fails in the end, with all saved and the senders named. But a learner waiting for the update of
its own refused push would wait for ever: this ends the job at once (law 9).
"""

from __future__ import annotations

from mpisgd.base.errors import PeerError
from mpisgd.base.terminal import warn
from mpisgd.comm.messages import Push, Refused

TOLD_PER_RANK = 5
_MOST_SAMPLES = 2**31 - 1
"""Most samples possible in the log."""


class Refusals:
    """Refused messages of a shard.

    Attributes:
        pushes: number of refused pushes, by learner.
        last_seq: mini-batch of the last accepted push, by learner.
        portions: number of portions dealt; 0 = none.
    """

    def __init__(self, lambda_: int) -> None:
        self.by_rank: dict[int, int] = {}
        self.pushes = [0] * lambda_
        self.last_seq = [-1] * lambda_
        self.portions = 0
        self._waits = [""] * lambda_
        """Reason for refusing each learner's last push, if refused."""

    def refuse(self, refused: Refused, learner_id: int, *, waits: bool = False) -> None:
        """Count a message of a rank, and report the first few. Raises PeerError as `check_waiting`.

        `waits`: the learner's pull waits already (`rounds.py`).
        """
        count = 1 + self.by_rank.get(refused.rank, 0)
        self.by_rank[refused.rank] = count
        if refused.push and learner_id >= 0:
            self.pushes[learner_id] += 1
            self._waits[learner_id] = refused.why
        if count <= TOLD_PER_RANK:
            more = f"; more of rank {refused.rank} are counted, but not told" if count == TOLD_PER_RANK else ""
            warn(f"mpisgd: a message was refused: {refused.why}{more}")
        if waits and refused.push:
            self.check_waiting(learner_id)

    def why_not(self, push: Push, clock: int, fresh_only: bool) -> str:
        """Return the reason against a complete push, or an empty text; `fresh_only`: the protocol waits for all learners."""
        learner_id, timestamp, seq = push.learner_id, push.timestamp, push.seq
        last = self.last_seq[learner_id]
        if not 0 <= timestamp <= clock:
            return f"learner {learner_id} pushed timestamp {timestamp}: expected 0 ... {clock}, the shard's clock"
        if fresh_only and timestamp != clock:
            return f"learner {learner_id} pushed timestamp {timestamp}: expected {clock}, the shard's clock"
        if not 0 <= seq <= last + 1:
            return f"learner {learner_id} pushed mini-batch {seq}: expected 0 ... {last + 1}, the next mini-batch"
        if not 1 <= push.samples <= _MOST_SAMPLES:
            return f"learner {learner_id} pushed a gradient of {push.samples} samples: expected 1 ... {_MOST_SAMPLES}"
        if self.portions and not 0 <= push.portion < self.portions:
            return f"learner {learner_id} pushed portion {push.portion}: expected 0 ... {self.portions - 1}"
        if seq > last:
            self.last_seq[learner_id] = seq
        self._waits[learner_id] = ""
        return ""

    def check_waiting(self, learner_id: int) -> None:
        """Raise PeerError where a waiting pull needs an update of its own refused push."""
        if self._waits[learner_id]:
            raise PeerError(f"learner {learner_id} waits for an update after a refused push: {self._waits[learner_id]}")

    @property
    def total(self) -> int:
        return sum(self.by_rank.values())

    @property
    def most(self) -> int:
        """Rank with most refusals; -1 = none."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank], default=-1)
