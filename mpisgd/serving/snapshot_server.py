"""A shard's answers to the evaluator: a snapshot, the last weights, or none."""

from __future__ import annotations

from mpisgd.comm.messages import FINAL, NOTHING_MORE
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.records.checkpoint.snapshots import Snapshots, Taken
from mpisgd.rules.rules import Rules
from mpisgd.vectors.computing import Copied
from mpisgd.vectors.memory import on_host


class SnapshotServer:
    """Answers once the requested snapshot exists, or never will; `is_open` until the evaluator's goodbye.

    `pulls`: pulls of learner 0 after a snapshot until its state is handed on (`checkpoint/buffers.py`).
    """

    def __init__(self, channel: ShardChannel, rules: Rules, update: Copied, snapshots: Snapshots, pulls: int = 0) -> None:
        self._channel = channel
        self._rules = rules
        self._update = update
        self._snapshots = snapshots
        self._pulls = pulls
        self._pulled, self._has_computed = 0, True
        self._taken_at: list[int] = []
        """Pulls of learner 0 before each snapshot."""
        self._asked: int | None = None
        self.is_open = True

    def ask(self, number: int | None) -> None:
        """Take a request for a snapshot, FINAL or NOTHING_MORE; None = the evaluator is dead."""
        self._asked = number
        self.answer()

    def has_computed(self) -> None:
        self._has_computed = True

    def has_pulled(self) -> None:
        """Note a pull of learner 0; repeated pulls for lagging shards do not count."""
        if not self._has_computed:
            return
        self._has_computed = False
        self._note_taken()
        self._pulled += 1
        if self._pulls and self._asked is not None:
            self.answer()

    def _note_taken(self) -> None:
        self._taken_at += [self._pulled] * (self._snapshots.count - len(self._taken_at))

    def _lacks_state(self, number: int) -> bool:
        """Return whether learner 0's state for this snapshot, or the last weights, is missing."""
        self._note_taken()
        if not self._pulls or 0 not in self._rules.present:
            return False
        return number == FINAL or self._pulled < self._taken_at[number] + self._pulls

    def answer(self) -> None:
        if self._asked is None:
            return
        if self._asked == NOTHING_MORE:
            self.is_open = False
        elif (taken := self.find(self._asked)) is not None:
            self._channel.answer_snapshot(taken.vectors, taken.clock, taken.samples, taken.taken_s)
        else:
            return
        self._asked = None

    def find(self, number: int) -> Taken | None:
        """Return a snapshot, with empty vectors if never; None if yet to come."""
        rules = self._rules
        there = (number == FINAL and rules.finished) or 0 <= number < self._snapshots.count
        if rules.interrupted and not rules.finished:  # late pushes may finish the run
            return None if rules.present else self._nothing()
        if there:
            return None if self._lacks_state(number) else self._taken(number)
        return self._nothing() if rules.finished else None

    def _nothing(self) -> Taken:
        return Taken(self._snapshots.nothing(), 0, 0, 0.0)

    def _taken(self, number: int) -> Taken:
        if number != FINAL:
            return self._snapshots.get(number)
        vectors = [self._update.weights] if self._update.averaged is None else [self._update.weights, self._update.averaged]
        now_s = self._channel.now_s()
        return Taken([on_host(vector) for vector in vectors], self._rules.clock, self._update.samples, now_s)
