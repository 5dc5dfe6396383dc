"""Learners that double as shards: reduce-scatter, update, all-gather [Chen16 5], the baseline of all parameter servers.

calculate       the gradient of the seq-th mini-batch
reduce-scatter  each slice goes to the learner that owns it, which sums those of all, in the order of learner_id
update          of the own slice, by the rules of hardsync
all-gather      every learner has the new weights of all slices

The reduce-scatter is an all-to-all of slices, summed where they arrive. As many bytes cross the wire as in MPI_Reduce_scatter,
(lambda - 1)/lambda of the vector from every rank; but the order of the sum is that of hardsync, and so are its bits, again and
again (law 5), where MPI may add in any order. Where all learners are on one node, nothing need be moved at all (`shared_team.py`).

The bookkeeping of a slice is `shard.Shard`'s, which is handed what a shard's messages would have said: so the log, the books and
the replay are those of hardsync with as many shards as learners. Nobody can leave alone.
"""

from __future__ import annotations

from functools import partial

from mpisgd.computing import Computes
from mpisgd.messages import Ending, Interrupt, Pull
from mpisgd.shard import Shard
from mpisgd.straggler import Delays
from mpisgd.team_channel import TeamChannel


def train(channel: TeamChannel, shard: Shard, gradient: Computes, delays: Delays, first_seq: int = 0) -> None:
    """Train from mini-batch `first_seq` until enough samples have been applied or a signal has come, then say goodbye (law 8).

    The evaluator may still ask for snapshots.
    """
    rules = shard.rules
    learners = sorted(rules.present)
    shard.begin()
    channel.start_answers(learners, shard.update.served, rules.clock, {})
    seq = first_seq
    while not (rules.finished or rules.interrupted):
        clock = channel.pull(partial(gradient.prepare, seq))
        if channel.watched and (asked := channel.snapshot_pull()) is not None:
            shard.handle(asked)
        start_ns = channel.now_ns()
        loss = gradient.compute(seq)
        compute_ns = channel.now_ns() - start_ns
        delay_s = delays.of(seq, compute_ns * 1e-9)
        if delay_s > 0:
            channel.sleep(delay_s)
        pushes = channel.exchange(seq=seq, samples=gradient.samples, loss=loss, compute_ns=compute_ns, delay_ns=int(delay_s * 1e9))
        if channel.signal:  # all have been told in this round, and come to an end after its update
            shard.handle(Interrupt(channel.signal))
        for learner_id in learners:
            shard.handle(Pull(learner_id, min_clock=clock + 1))
        for push in pushes:
            shard.update.turn_to(push.learner_id)
            shard.handle(push)  # the last one makes the update, and begins the all-gather
        seq += 1
    ending = Ending.FINISHED if rules.finished else Ending.INTERRUPTED
    for goodbye in channel.goodbyes(pushed=seq - first_seq, ending=ending):
        shard.handle(goodbye)
