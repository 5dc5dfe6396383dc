"""A serial order of everything that a run did: each gradient after the weights it came from, each shard as its log says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record


class Compute(NamedTuple):
    """The gradient of a learner's `number`-th push is computed."""

    learner_id: int
    number: int


class Take(NamedTuple):
    """A shard takes that gradient: row `row` of its `pushes`."""

    shard: int
    row: int
    learner_id: int
    number: int


class Update(NamedTuple):
    """A shard makes the update that gives it this clock."""

    shard: int
    clock: int


Action = Compute | Take | Update


def serial_order(record: Record) -> Iterator[Action]:
    """Each shard goes on as far as it can, in turn; a gradient is computed when the first shard takes it.

    A learner's next gradient waits until all shards have taken the one before, as it did in the run: so never more gradients than
    learners are under way between shards. Where the logs end early, this ends at the first gradient that not all of them have.

    Raises Untrue where logs that are whole leave no order: a gradient came from weights that it helped to make.
    """
    actions = _Order(record).actions()
    return _together(actions, len(record.shards)) if record.config.agrees else actions


def _together(actions: Iterator[Action], shards: int) -> Iterator[Action]:
    """Where shards agree on something, all sums of an update are there before the first of them makes it; where the logs end
    early, an update that not all are seen to have made is left out."""
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
        """Whether all shards have taken the gradient before, and have made the weights that this one came from."""
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
                refuse("it was computed from weights that were made, by way of other shards, after it", shard, "pushes", **place)
