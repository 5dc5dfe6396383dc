"""Learner's loop: pull, compute, push, until a shard says stop [Zhang16 2.2; Chen16 Alg. 1, 3].

getMinibatch    sample the seq-th mini-batch
calcGradient    forward and backward into the flat gradient
pushGradient    one slice to each shard, with the clock of its weights
pullWeights     wait for the protocol's next weights
"""

from __future__ import annotations

import functools
import math

from mpisgd.comm.communicator import Broken
from mpisgd.comm.messages import Ending
from mpisgd.exchange.exchange import Answers, Exchange, Interrupted, Left, Report
from mpisgd.gradient.straggler import Delays
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.computing import Computes, Keeps

KEEPS_NOTHING = Keeps()


def learn(
    channel: Exchange,
    protocol: Protocol,
    gradient: Computes,
    delays: Delays,
    share: float = math.inf,
    first_seq: int = 0,
    keeper: Keeps = KEEPS_NOTHING,
) -> None:
    """Train from mini-batch `first_seq` until a shard says stop, or `share` are done; then say goodbye to all (law 8)."""
    try:
        answers = _train(channel, protocol, gradient, delays, share, first_seq, keeper)
        ending = answers.stop
        keeper.end(answers.snapshots, answers.clocks[0], interrupted=ending == Ending.INTERRUPTED)
    except Left:
        ending = Ending.NONE
    except Broken:
        ending = Ending.BROKEN
    channel.goodbye(ending=ending)


def _train(
    channel: Exchange, protocol: Protocol, gradient: Computes, delays: Delays, share: float, first_seq: int, keeper: Keeps
) -> Answers:
    keeps = keeper is not KEEPS_NOTHING
    takes_time, pushes_per_pull = protocol.consistent or channel.duplex, protocol.pushes_per_pull
    if protocol.aborts:
        channel.interrupt_by_notices()
        gradient.interrupt_by(channel.check)
    seq = begun = first_seq
    gradient.prepare(seq)
    answers = channel.pull(min_clock=0)
    while seq < share and not answers.stop:
        start_ns, waited_ns, clock = channel.now_ns(), gradient.waited.ns, min(answers.clocks)
        begun += 1
        if keeps:
            keeper.begins(answers.snapshots, answers.clocks[0])
        gradient.at_clock(clock)
        try:
            loss = gradient.compute(seq)
            neighbour_ns = gradient.waited.ns - waited_ns
            compute_ns = channel.now_ns() - start_ns - neighbour_ns - channel.exchanging_ns
            delay_s = delays.of(begun - 1, compute_ns * 1e-9)
            if delay_s > 0:
                channel.sleep(delay_s)
            goes_on = (seq + 1) % pushes_per_pull != 0  # without a pull, from weights of its own
            delay_ns, scale = int(delay_s * 1e9), gradient.scaled.by
            told = gradient.rounded, neighbour_ns, scale, gradient.skipped
            report = Report(seq, gradient.samples, loss, compute_ns, delay_ns, *told)
            channel.push(report, gradient.take_own_step if goes_on else None)
        except Interrupted:  # too late for an update: the same mini-batch anew, on the new weights; or the run is over
            gradient.give_up()
            keeper.give_up()
            channel.gave_up(seq)
            answers = channel.pull(protocol.next_clock(clock))
            continue
        if goes_on:
            seq += 1
            gradient.prepare(seq)
            continue
        min_clock = protocol.next_clock(clock)
        if takes_time:  # to answer: prepare meanwhile
            answers = channel.pull(min_clock, meanwhile=functools.partial(gradient.prepare, seq + 1))
        else:  # the answer is immediate, and holds up the shard until taken
            gradient.prepare(seq + 1)
            answers = channel.pull(min_clock)
        if not answers.rejected:  # else the same mini-batch again, on newer weights
            seq += 1
    return answers
