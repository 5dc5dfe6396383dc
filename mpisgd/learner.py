"""A learner's loop: pull, compute, push, until a shard says stop [Zhang16 2.2; Chen16 Alg. 1, 3].

getMinibatch    sample the seq-th mini-batch
calcGradient    forward and backward into the flat gradient
pushGradient    one slice to each shard, with the clock of the weights it was computed from
pullWeights     wait for the weights that the protocol asks for
"""

from __future__ import annotations

import functools

from mpisgd.channel import LearnerChannel
from mpisgd.computing import Computes
from mpisgd.protocols.base import Protocol
from mpisgd.straggler import Delays


def learn(channel: LearnerChannel, protocol: Protocol, gradient: Computes, delays: Delays) -> None:
    """Train until a shard stops the run; then say goodbye to every shard (law 8)."""
    seq, push_ns, consistent = 0, 0, protocol.consistent
    gradient.prepare(seq)
    answers = channel.pull(min_clock=0)
    while not answers.stop:
        start_ns = channel.now_ns()
        loss = gradient.compute(seq)
        compute_ns = channel.now_ns() - start_ns
        delay_s = delays.of(seq, compute_ns * 1e-9)
        if delay_s > 0:
            channel.sleep(delay_s)
        push_ns = channel.push(
            seq=seq,
            samples=gradient.samples,
            loss=loss,
            compute_ns=compute_ns,
            delay_ns=int(delay_s * 1e9),
            last=answers,
            push_ns=push_ns,
        )
        seq += 1
        min_clock = protocol.next_clock(min(answers.clocks))
        if consistent:  # the answer takes its time: prepare meanwhile
            answers = channel.pull(min_clock, meanwhile=functools.partial(gradient.prepare, seq))
        else:  # the answer is immediate, and a learner that does not take it holds up the shard
            gradient.prepare(seq)
            answers = channel.pull(min_clock)
    channel.goodbye(finished=True)
