"""Fates of learners, from the log: mini-batches that were pushed, losses, absences, portions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.record import Record
from mpisgd.replay.rerun.script import ShardScript, leaves
from mpisgd.rules.portions import NO_PORTION, Portions
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.simulate.failures import LearnerFailed

_UNLOGGED = 2
"""Pushes on the way at a log's end."""


def costs_of(record: Record, learner_id: int, before_last: Callable[[], None]) -> Iterator[int]:
    """Yield 0 for each of a learner's mini-batches; call `before_last` before the last pushed is computed.

    Raises LearnerFailed: no more was pushed.
    """
    pushes, each = max(len(log.rows_of[learner_id]) for log in record.shards), record.config.mini_batches_per_push
    for number in range(pushes):
        if number + 1 == pushes:
            before_last()
        yield from [0] * each
    if (record.config.per_layer or record.config.in_buckets) and not parts(record, learner_id):
        yield from [0] * each  # by layers a learner pulls as it computes
    if not _leaves(record, learner_id):
        yield from [0] * (_UNLOGGED * each)
    raise LearnerFailed(learner_id, 0)


def parts(record: Record, learner_id: int) -> bool:
    return any(Event.GOODBYE in log.events_of[learner_id]["kind"] for log in record.shards)


def _leaves(record: Record, learner_id: int) -> bool:
    """Return whether a learner was lost, or left by itself: else a shard without DEPARTED has stopped it."""
    kinds = [set(log.events_of[learner_id]["kind"].tolist()) for log in record.shards]
    parted = [Event.DEPARTED in each for each in kinds if Event.GOODBYE in each]
    if parted:
        return all(parted) and any(leaves(log, learner_id) for log in record.shards)
    return any(Event.LOST in each for each in kinds)


def given_last(record: Record) -> dict[int, int]:
    """Return the least clock of the last weights of learners that left: lagging shards were asked again."""
    logs, found = record.shards, dict[int, int]()
    for learner_id in range(logs[0].lambda_ if len(logs) > 1 else 0):
        last = [log.pushes["answer_s"][log.rows_of[learner_id][-1:]] for log in logs]
        answered = all(len(each) and not np.isnan(each[0]) for each in last)
        if answered and parts(record, learner_id) and _leaves(record, learner_id):
            clocks = (np.searchsorted(log.updates["time_s"], each[0], side="right") for log, each in zip(logs, last, strict=True))
            found[learner_id] = logs[0].start.clock + int(max(clocks))
    return found


class ByLog(FaultTolerant):
    """Presence of a shard's learners as the log tells, where the rules allow."""

    def __init__(self, script: ShardScript, *arguments: Any) -> None:
        self._script = script
        super().__init__(*arguments)

    @property
    def look_s(self) -> float:
        return 0.0 if self._script.tells_presence else math.inf

    @look_s.setter
    def look_s(self, second: float) -> None:
        """Ignore the clock."""

    def look(self, whose: int | None) -> None:
        kind, learner_id = self._script.presence()
        if kind == Event.MISSED:
            self._miss(learner_id)
        elif kind == Event.RETURNED and learner_id in self._rules.absent:  # else a push told
            self._return(learner_id)
            self._shard.settle()
        elif kind == Event.PASSED and self._rules.membership.passes(learner_id, self._rules.clock + 1, stuck=True):
            self._pass(learner_id)

    def _note(self, event: Event, learner_id: int, text: str, value: float = 0.0) -> None:
        self._shard.log.event(event, self._rules.clock, self._channel.now_s(), learner_id, value)

    def _end_if_none_is_left(self, lost: bool) -> None:
        """End as the log does: the run may be over on another shard."""
        rules = self._rules
        if lost and not rules.present and (rules.interrupted or not rules.absent):
            self._shard.end_if_deserted()

    def note_given(self, learner_id: int) -> None:
        self._owes(learner_id, self._channel.now_s(), push=True)

    def note_if_alone(self, learner_id: int) -> None:
        """Ignore it: the log tells."""

    def note_if_passed(self, learner_id: int, min_clock: int) -> None:
        """Ignore it: the log tells."""

    def note_who_passes(self) -> None:
        """Ignore it: the log tells."""


class DealtByLog(Portions):
    """Portions as the logs tell that they were dealt."""

    def __init__(self, portions: Portions, record: Record, script: ShardScript) -> None:
        self._logs = record.shards
        super().__init__(portions.total, len(self._logs[0].rows_of), deals=True)
        self._script = script

    def of(self, learner_id: int) -> int:
        for portion in (self._script.portion_of(learner_id), self._pushed_elsewhere(learner_id)):
            if portion != NO_PORTION:
                return portion
        return super().of(learner_id)

    def _pushed_elsewhere(self, learner_id: int) -> int:
        """Return the portion of a push that only other shards logged."""
        number = len(self._logs[0].rows_of[learner_id])
        rows = ((log, log.rows_of[learner_id]) for log in self._logs)
        return next((int(log.pushes["portion"][own[number]]) for log, own in rows if len(own) > number), NO_PORTION)
