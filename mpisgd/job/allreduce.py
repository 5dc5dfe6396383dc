"""Learners that double as shards: reduce-scatter, update, all-gather [Chen16 5], the baseline of all parameter servers.

calculate       the gradient of the seq-th mini-batch
reduce-scatter  each slice goes to the learner that owns it, which sums those of all, in the order of learner_id
update          of the own slice, by the rules of hardsync
all-gather      every learner has the new weights of all slices

The reduce-scatter is an all-to-all of slices, summed where they arrive. As many bytes cross the wire as in MPI_Reduce_scatter,
(lambda - 1)/lambda of the vector from every rank; but the order of the sum is that of hardsync, and so are its bits, again and
again (law 5), where MPI may add in any order. Where all learners are on one node, nothing need be moved at all (`shared.py`).

With exchange = "layerwise" slices travel in parts, behind the rest of the backward pass (`exchange/collectives/buckets.py`).

The learner's loop is that of all (`learner.py`), and the bookkeeping of a slice is `shard.Shard`'s, which is handed what a shard's
messages would have said: so the log, the books and the replay are those of hardsync with as many shards as learners. Nobody can
leave alone.
"""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.comm.messages import Ending, Interrupt, Pull
from mpisgd.exchange.base import Answers, Exchange, Report
from mpisgd.exchange.collectives.channel import TeamChannel
from mpisgd.shard import Shard


class Collective(Exchange):
    """A learner's end, and its shard. Made when the run begins: the first weights are then on their way to all."""

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
        """Wait for the all-gather, unless the run is over. The evaluator may have asked for a snapshot."""
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
        """Exchange the slices of all gradients, and make the update of the own one; `TeamChannel` counts its seconds itself."""
        shard, channel = self._shard, self._channel
        pushes = channel.exchange(report)
        self._pushed += 1
        if channel.signal:  # all have been told in this round, and come to an end after its update
            shard.handle(Interrupt(channel.signal))
        for learner_id in self._learners:
            shard.handle(Pull(learner_id, min_clock=shard.rules.clock + 1))
        for push in pushes:
            shard.update.turn_to(push.learner_id)
            shard.handle(push)  # the last one makes the update, and begins the all-gather

    def goodbye(self, *, ending: int) -> None:
        """Say it to all; the evaluator may still ask for snapshots."""
        for goodbye in self._channel.goodbyes(pushed=self._pushed, ending=ending):
            self._shard.handle(goodbye)


def _nothing() -> None:
    """The first mini-batch was prepared before the first weights."""
