"""Learners that double as shards: reduce-scatter, update, all-gather [Chen16 5].

    calculate       the gradient of mini-batch seq
    reduce-scatter  each slice to its owner, summed in the order of learner_id
    update          of the own slice, by the rules of hardsync
    all-gather      of the new weights

The order of the sum, hence the bits, are hardsync's (law 5). On a single node nothing moves (`shared.py`). In buckets
slices travel in parts, behind the backward pass (`bucket_channel.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.comm.messages import Ending, Interrupt, Pull
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.exchange.exchange import Answers, Exchange, Report
from mpisgd.shard import Shard


class Collective(Exchange):
    """A learner's end, and its shard; construction sends the first weights."""

    def __init__(self, channel: TeamChannel, shard: Shard) -> None:
        self._channel = channel
        self._shard = shard
        self._learners = sorted(shard.rules.present)
        self._pushed = 0
        shard.begin()
        shard.answering.give_first(self._learners)

    @property
    def exchanging_ns(self) -> int:
        return self._channel.exchanging_ns

    def now_ns(self) -> int:
        return self._channel.now_ns()

    def sleep(self, seconds: float) -> None:
        self._channel.sleep(seconds)

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        rules, ending = self._shard.rules, Ending.NONE
        if rules.finished or rules.interrupted:
            ending = Ending.FINISHED if rules.finished else Ending.INTERRUPTED
        else:
            self._channel.pull(meanwhile or _nothing)
            if self._channel.watched and (asked := self._channel.snapshot_pull()) is not None:
                self._shard.handle(asked)
            self._channel.begin()
        return Answers((rules.clock,), ending, False, self._shard.records.snapshots.count)

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Exchange the slices of all gradients, and update the own slice; `TeamChannel` counts its seconds."""
        shard, channel = self._shard, self._channel
        pushes = channel.exchange(report)
        self._pushed += 1
        if channel.signal:  # told to all in this round: all end after its update
            shard.handle(Interrupt(channel.signal))
        for learner_id in self._learners:
            shard.handle(Pull(learner_id, min_clock=shard.rules.clock + 1))
        for push in pushes:
            shard.handle(push)  # the last makes the update, and begins the all-gather

    def goodbye(self, *, ending: int) -> None:
        for goodbye in self._channel.goodbyes(pushed=self._pushed, ending=ending):
            self._shard.handle(goodbye)


def _nothing() -> None:
    """Do nothing: the first mini-batch is ready before the first weights."""
