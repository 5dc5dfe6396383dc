"""Serial order of a run's actions: each gradient after its weights, each shard as in its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record


class Compute(NamedTuple):
    """Computation of the gradient of a learner's `number`-th push."""

    learner_id: int
    number: int


class Take(NamedTuple):
    shard: int
    row: int
    learner_id: int
    number: int


class Update(NamedTuple):
    shard: int
    clock: int


Action = Compute | Take | Update


def serial_order(record: Record) -> Iterator[Action]:
    """Yield actions: each shard in turn goes as far as possible; a gradient is computed before its first receipt.

    If logs end early, the order ends at the first gradient missing on any shard. Raises Untrue: whole logs leave no order.
    """
    actions = _Order(record).actions()
    return _together(actions, len(record.shards)) if record.config.agrees else actions


def _together(actions: Iterator[Action], shards: int) -> Iterator[Action]:
    """Yield updates of shards that agree on something after all their sums."""
    made: list[Update] = []
    for action in actions:
        if not isinstance(action, Update):
            yield action
            continue
        made.append(action)
        if len(made) == shards:
            yield from made
            made.clear()


class _Order:
    def __init__(self, record: Record) -> None:
        self.record = record
        self.moved = True
        self.clocks = [shard.start.clock for shard in record.shards]
        self.rows = [0 for _ in record.shards]
        self.taken = [[0] * record.lambda_ for _ in record.shards]
        self.computed = [-1] * record.lambda_
        self._row_clocks = [shard.pushes["clock"].tolist() for shard in record.shards]
        self._learners = [shard.pushes["learner_id"].tolist() for shard in record.shards]
        self._stamps = [shard.pushes["timestamp"] for shard in record.shards]

    def actions(self) -> Iterator[Action]:
        while self.moved:
            self.moved = False
            for shard in range(len(self.record.shards)):
                yield from self.advance(shard)
        if self.record.whole:
            self.check_end()

    def advance(self, shard: int) -> Iterator[Action]:
        log, row_clocks = self.record.shards[shard], self._row_clocks[shard]
        while True:
            row = self.rows[shard]
            upcoming = row_clocks[row] if row < len(row_clocks) else log.final_clock
            if upcoming > self.clocks[shard]:
                self.clocks[shard] += 1
                self.moved = True
                yield Update(shard, self.clocks[shard])
                continue
            if row == len(row_clocks):
                return
            learner_id = self._learners[shard][row]
            number = self.taken[shard][learner_id]
            if self.computed[learner_id] < number:
                if not self._computable(learner_id, number):
                    return
                self.computed[learner_id] = number
                yield Compute(learner_id, number)
            self.moved = True
            self.rows[shard] += 1
            self.taken[shard][learner_id] += 1
            yield Take(shard, row, learner_id, number)

    def _computable(self, learner_id: int, number: int) -> bool:
        if not self.record.has_gradient(learner_id, number):
            return False
        for shard, log in enumerate(self.record.shards):
            timestamp = self._stamps[shard][log.rows_of[learner_id][number]]
            if self.taken[shard][learner_id] < number or timestamp > self.clocks[shard]:
                return False
        return True

    def check_end(self) -> None:
        for shard, row in enumerate(self.rows):
            log = self.record.shards[shard]
            if row < len(log.pushes):
                stuck = log.row(row)
                place = {"row": row, "clock": stuck.clock, "learner_id": stuck.learner_id, "seq": stuck.seq}
                refuse(
                    "the gradient was computed from weights made, by way of other shards, after this push", shard, "pushes", **place
                )
