"""Messages that a shard refuses: that cannot be, so that whoever sent them is a bug, or a foreign program.

One such message does not end the work of all: it is dropped and logged, and the shard lives. The run fails in the end, with all
that it made saved, and names who sent them. But where a learner waits for an update that its own refused push was for, nobody
would ever go on: that ends the job at once (law 9).
"""

from __future__ import annotations

from mpisgd.base.errors import PeerError
from mpisgd.base.speech import warn
from mpisgd.comm.messages import Push, Refused

TOLD_PER_RANK = 5
_MOST_SAMPLES = 2**31 - 1
"""Most samples that the log has room for."""


class Refusals:
    """Refused messages of one shard.

    Attributes:
        by_rank: how many messages of each rank.
        pushes: per learner, how many of them began a push.
        last_seq: per learner, the mini-batch of its last push that was taken.
        portions: how many there are, where data are dealt in portions; 0 = they are not.
    """

    def __init__(self, lambda_: int) -> None:
        self.by_rank: dict[int, int] = {}
        self.pushes = [0] * lambda_
        self.last_seq = [-1] * lambda_
        self.portions = 0
        self._waits = [""] * lambda_
        """Reason why the last push of each learner was refused, if it was."""

    def refuse(self, refused: Refused, learner_id: int, *, waits: bool = False) -> None:
        """Count a message of a rank, which is this learner (-1 = none), and say so, but not for ever.

        `waits`: its pull does already, as where it asks before it pushes (`both_ways/`). Raises PeerError where that is for ever.
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
        """Say why a push, whole and of the right size, cannot be; "" = it can. `fresh_only`: the protocol waits for all
        learners."""
        learner_id, timestamp, seq = push.learner_id, push.timestamp, push.seq
        last = self.last_seq[learner_id]
        if not 0 <= timestamp <= clock:
            return f"learner {learner_id} pushed timestamp {timestamp}: expected 0 ... {clock}, the shard's clock"
        if fresh_only and timestamp != clock:
            return f"learner {learner_id} pushed timestamp {timestamp}: expected {clock}, the shard's clock"
        if not 0 <= seq <= last + 1:
            return f"learner {learner_id} pushed mini-batch {seq}: expected 0 ... {last + 1}, the next one"
        if not 1 <= push.samples <= _MOST_SAMPLES:
            return f"learner {learner_id} pushed a gradient of {push.samples} samples: expected 1 ... {_MOST_SAMPLES}"
        if self.portions and not 0 <= push.portion < self.portions:
            return f"learner {learner_id} pushed portion {push.portion}: expected 0 ... {self.portions - 1}"
        if seq > last:
            self.last_seq[learner_id] = seq
        self._waits[learner_id] = ""
        return ""

    def check_waiting(self, learner_id: int) -> None:
        """A learner's pull must wait. Raises PeerError where it would for ever: for an update that its refused push was for."""
        if self._waits[learner_id]:
            raise PeerError(f"learner {learner_id} waits for an update after its push was refused: {self._waits[learner_id]}")

    @property
    def total(self) -> int:
        return sum(self.by_rank.values())

    @property
    def most(self) -> int:
        """The rank that sent most of them; -1 = there are none."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank], default=-1)
