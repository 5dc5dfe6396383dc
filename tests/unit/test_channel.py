"""Push, pull and stop: what arrives is what was sent, nobody blocks on whom he must not, and what cannot be is refused.

Over the virtual cluster's wires, whose sends all block until they are taken (law 1); and, where bytes matter, over the real
wire, with messages that lie before it in memory (DESIGN 4, 5).
"""

from __future__ import annotations

import inspect
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import DeadlockError, PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import (
    FINAL,
    LAYOUTS,
    MAGIC,
    NOBODY,
    NOTHING_MORE,
    Ending,
    Goodbye,
    Interrupt,
    Message,
    Pull,
    Push,
    Refused,
    SnapshotPull,
    Tag,
)
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.exchange.base import Answers, Interrupted, Report
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.vectors.flat import slice_bounds
from tests.unit.fakes import Comm, Envelope, Stuck, told, wire_without_mpi
from tests.virtual.scene import FREE, Scene, WatchedWire, packed

SIZE = 6
SLICE = 4 * SIZE
ZERO = (0,) * 7
ASKS = NetworkOptions(latency_s=1e-3, overhead_s=1e-4)


class Job:
    """Shards, learners and an evaluator on virtual ranks, whose mains are given to `run`; the others leave at once."""

    def __init__(
        self,
        shards: int = 1,
        learners: int = 2,
        *,
        evaluator: bool = False,
        consistent: bool = False,
        interruptible: bool = False,
        network: NetworkOptions = ASKS,
    ) -> None:
        self.roles = packed(shards, learners, evaluator)
        self.scene = Scene(shards + learners + evaluator, network=network, name=self.roles.describe, wire=WatchedWire)
        self.wires = self.scene.wires
        self.bounds = slice_bounds(SIZE, shards)
        self.shards = [ShardChannel(self.wires[shard], self.roles, shard) for shard in range(shards)]
        self.scratch = [np.zeros(end - start, np.float32) for start, end in self.bounds]
        self.weights = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.gradients = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.learners = [
            LearnerChannel(
                self.wires[rank],
                self.roles,
                learner_id,
                weights=self.weights[learner_id],
                gradients=self.gradients[learner_id],
                bounds=self.bounds,
                consistent=consistent,
                interruptible=interruptible,
            )
            for learner_id, rank in enumerate(self.roles.learner_ranks)
        ]
        self.asked: list[tuple[int, int, int]] = []
        self.received: list[tuple[int, Message]] = []

    def run(self, mains: dict[int, Callable[[], None]]) -> Job:
        self.scene.run(mains)
        return self

    def receive(self, shard: int = 0, learner_id: int | None = None) -> Message:
        message = self.shards[shard].receive(self.scratch[shard], learner_id)
        self.received.append((shard, message))
        return message

    def answers(self, shard: int, clocks: list[int]) -> None:
        """A shard takes one pull after the other, and gives it the next of these clocks; -1 = stop."""
        channel = self.shards[shard]
        for clock in clocks:
            message = self.receive(shard)
            assert isinstance(message, Pull)
            self.asked.append((shard, message.learner_id, message.min_clock))
            if clock < 0:
                channel.stop(message.learner_id, 99, Ending.FINISHED)
            else:
                weights = np.full(len(self.scratch[shard]), 10 * shard + clock, np.float32)
                channel.start_answers([message.learner_id], weights, clock, {})
                channel.finish_answers()

    def pulled(self, clocks: list[list[int]], min_clock: int) -> Answers:
        """What learner 0 gets where the shards answer with these clocks, in turn."""
        found: list[Answers] = []
        mains: dict[int, Callable[[], None]] = {shard: lambda s=shard: self.answers(s, clocks[s]) for shard in range(len(clocks))}  # type: ignore[misc]
        mains[len(clocks)] = lambda: found.append(self.learners[0].pull(min_clock))
        self.run(mains)
        return found[0]

    def push(self, learner_id: int, seq: int = 0, meanwhile: Callable[[], None] | None = None) -> int:
        channel = self.learners[learner_id]
        channel._clocks = [0 for _ in self.shards]
        channel.push(Report(seq, samples=1, loss=0.5, compute_ns=0, delay_ns=0), meanwhile)
        return channel.push_ns


# ------------------------------------------------------------------------------------------------------------- push


def test_a_push_arrives_as_it_was_sent() -> None:
    job = Job(shards=2, learners=3)
    answers: list[Answers] = []
    waited: list[tuple[int, int]] = []

    def learner() -> None:
        channel = job.learners[2]
        answers.append(channel.pull(min_clock=5))
        job.gradients[2][:] = range(SIZE)
        waited.append((channel._wait_ns, channel._pull_ns))
        channel.push_ns = 7
        channel.push(Report(seq=11, samples=16, loss=0.125, compute_ns=3, delay_ns=4, rounded=0.25, neighbour_ns=6, scale=8.0))
        assert channel.push_ns > 7
        assert channel.pushed == [1, 1]
        channel.goodbye(ending=Ending.FINISHED)

    def shard(number: int) -> None:
        job.answers(number, [7 + 2 * number])
        for _ in range(2):
            job.receive(number)

    job.run({0: lambda: shard(0), 1: lambda: shard(1), 4: learner})
    assert (answers[0].clocks, answers[0].stop) == ((7, 9), False)
    assert min(waited[0]) > 0
    assert job.asked == [(0, 2, 5), (1, 2, 5)]
    assert job.weights[2].tolist() == [7, 7, 7, 19, 19, 19]
    for number, timestamp in enumerate((7, 9)):
        _, push, goodbye = (message for whose, message in job.received if whose == number)
        assert told(push) == (Push, 2, timestamp, 11, 16, 1, 3, 4, 7, *waited[0], 6, SLICE // 2, -1, 0.25, 8.0, 0.125)
        assert push.arrival_ns > 0
        assert job.scratch[number].tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
        assert goodbye == Goodbye(2, 1, Ending.FINISHED)


@pytest.mark.parametrize(("meanwhile_s", "took_s"), [(0.0, 2.0), (1.5, 2.0), (3.0, 3.0)])
def test_what_is_done_while_a_push_is_under_way_costs_what_it_takes_longer(meanwhile_s: float, took_s: float) -> None:
    """The second of two shards takes its slice after two seconds."""
    job = Job(shards=2, learners=1, network=FREE)
    took_ns: list[int] = []

    def learner() -> None:
        took_ns.append(job.push(0, meanwhile=lambda: job.wires[2].sleep(meanwhile_s)))

    def second() -> None:
        job.wires[1].sleep(2.0)
        job.receive(1)

    job.run({0: lambda: job.receive(0), 1: second, 2: learner})  # type: ignore[dict-item, return-value]
    assert took_ns == [took_s * 1e9]


def test_a_learner_has_finished_its_pushes_to_all_shards_before_it_pulls() -> None:
    """Law 1: were it to pull in between, it could be blocked on a shard that is blocked on another."""
    job = Job(shards=3, learners=1)
    finished_ns: list[int] = []

    def learner() -> None:
        job.push(0)
        finished_ns.append(job.wires[3].now_ns())
        assert job.wires[3].sent == [(shard, Tag.PUSH) for shard in range(3)]
        assert job.wires[3].posted == []
        job.learners[0].pull(0)

    def shard(number: int) -> None:
        job.wires[number].sleep(1.0 * number)
        assert isinstance(job.receive(number), Push)
        job.answers(number, [0])

    job.run({0: lambda: shard(0), 1: lambda: shard(1), 2: lambda: shard(2), 3: learner})
    assert finished_ns[0] > 2e9
    assert job.wires[3].sent[3:] == [(shard, Tag.PULL) for shard in range(3)]


def test_pulls_go_first_so_a_push_must_be_taken_before_its_learner_pulls() -> None:
    """Else a pull overtakes its own push in MPI's eager buffers, is answered with old weights, and pushes starve."""
    job = Job(learners=2)

    def shard() -> None:
        job.wires[0].sleep(1.0)  # busy: both are here when it looks, the push first
        for _ in range(3):
            if isinstance(job.receive(), Pull):
                job.shards[0].start_answers([1], job.scratch[0], 0, {})
                job.shards[0].finish_answers()

    def pushes() -> None:
        assert job.push(0) > 0.9e9, "it waits until the shard has taken it"
        job.learners[0].goodbye(ending=Ending.FINISHED)

    def pulls() -> None:
        job.wires[2].sleep(0.5)
        job.learners[1].pull(0)

    job.run({0: shard, 1: pushes, 2: pulls})
    assert [type(message) for _, message in job.received] == [Pull, Push, Goodbye]
    assert [Tag(tag) for tag, layout in LAYOUTS.items() if layout.announced] == [Tag.PUSH, Tag.GOODBYE]


def test_a_shard_may_choose_whose_push_is_next_but_takes_pulls_of_all() -> None:
    """What hardsync rests on: learner 1 must get its weights while the shard waits for learner 0 to compute."""
    job = Job(learners=3, evaluator=True)
    wires = job.wires

    def after(seconds: float, action: Callable[[], Any], rank: int) -> Callable[[], None]:
        def main() -> None:
            wires[rank].sleep(seconds)
            action()

        return main

    def shard() -> None:
        for turn in (0, 0, 0, 1):
            job.receive(learner_id=turn)

    def asks(rank: int, tag: Tag, *fields: int) -> Callable[[], None]:
        return after(1.0, lambda: wires[rank].finish(wires[rank].start(0, tag, fields)), rank)

    job.run(
        {
            0: shard,
            1: after(2.0, lambda: job.push(0), 1),
            2: after(0.0, lambda: job.push(1), 2),
            3: asks(3, Tag.PULL, 2, 4),
            4: asks(4, Tag.SNAPSHOT_PULL, 3, 0),
        }
    )
    messages = [message for _, message in job.received]
    assert [told(message) for message in messages[:2]] == [(Pull, 2, 4), (SnapshotPull, 3, 0)]
    assert [message.learner_id for message in messages[2:] if isinstance(message, Push)] == [0, 1]


def test_a_shard_that_waits_for_one_learner_leaves_the_others_pushes_untouched() -> None:
    job = Job(learners=2)
    with pytest.raises(DeadlockError, match=r"rank 2 \(learner 1\) sends PUSH to rank 0"):
        job.run({0: lambda: job.receive(learner_id=0), 2: lambda: job.push(1)})  # type: ignore[dict-item, return-value]
    assert job.received == []


# ------------------------------------------------------------------------------------------------------------- pull


def test_a_shard_that_lags_is_asked_again_where_one_clock_is_promised() -> None:
    job = Job(shards=3, learners=1, consistent=True)
    assert job.pulled([[4, 6], [5, 6], [6]], min_clock=4).clocks == (6, 6, 6)
    assert job.asked == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (0, 0, 6), (1, 0, 6)]
    assert job.weights[0].tolist() == [6, 6, 16, 16, 26, 26]


def test_a_shard_that_overtakes_while_another_is_asked_again_is_caught_up_with() -> None:
    job = Job(shards=2, learners=1, consistent=True)
    assert job.pulled([[4, 6], [5, 6]], min_clock=4).clocks == (6, 6)
    assert job.asked == [(0, 0, 4), (1, 0, 4), (0, 0, 5), (1, 0, 6)]


def test_shards_may_differ_where_no_clock_is_promised() -> None:
    job = Job(shards=2, learners=1)
    assert job.pulled([[4], [9]], min_clock=0).clocks == (4, 9)
    assert len(job.asked) == 2


@pytest.mark.parametrize(("clocks", "asked"), [([[-1], [5]], 2), ([[5], [-1]], 2), ([[4, -1], [5]], 3)])
def test_one_shards_stop_ends_the_pull(clocks: list[list[int]], asked: int) -> None:
    """Whichever says it, and when asked again; all posted receives are over then, so that nothing is left in MPI."""
    job = Job(shards=2, learners=1, consistent=True)
    assert job.pulled(clocks, min_clock=0).stop
    assert len(job.asked) == asked
    assert len(job.wires[2].posted) == asked
    assert job.wires[2].unmet.total() == 0


def test_one_answer_goes_to_many_and_is_sent_before_the_weights_change() -> None:
    job = Job(learners=2)
    weights = np.arange(SIZE, dtype=np.float32)

    def shard() -> None:
        for _ in range(2):
            job.receive()
        job.shards[0].start_answers([0, 1], weights, 3, {})
        job.shards[0].finish_answers()
        weights[:] = -1

    job.run({0: shard, 1: lambda: job.learners[0].pull(0), 2: lambda: job.learners[1].pull(0)})  # type: ignore[dict-item, return-value]
    assert [own.tolist() for own in job.weights] == [list(range(SIZE))] * 2


def interrupted(learner: LearnerChannel) -> bool:
    try:
        learner.check()
    except Interrupted:
        return True
    return False


def test_a_learner_that_computes_is_told_of_an_update_once() -> None:
    job, seen = Job(learners=1, interruptible=True), []

    def shard() -> None:
        job.answers(0, [0])
        job.shards[0].notify([0], 1)
        job.answers(0, [1])

    def learner() -> None:
        channel = job.learners[0]
        channel.pull(0)
        job.wires[1].sleep(1.0)
        seen.extend([interrupted(channel), interrupted(channel)])
        channel.pull(1)
        seen.append(interrupted(channel))

    job.run({0: shard, 1: learner})
    assert seen == [True, False, False]


def test_a_notice_that_crossed_a_push_interrupts_no_later_mini_batch() -> None:
    """Three times over, so that the two receives that are posted would have been used up."""
    job, seen = Job(learners=1, interruptible=True), []

    def shard() -> None:
        for clock in range(4):
            job.answers(0, [clock])
            if clock < 3:
                job.shards[0].notify([0], clock + 1)

    def learner() -> None:
        channel = job.learners[0]
        for clock in range(4):
            channel.pull(clock)  # the notice of the mini-batch before is taken with the answer
            seen.append(interrupted(channel) if clock == 3 else None)

    job.run({0: shard, 1: learner})
    assert seen[-1] is False


def test_after_its_goodbye_a_learner_is_not_interrupted() -> None:
    """It may evaluate then, with the model whose layers look for notices; one shard may be later than the one that said stop."""
    job, seen = Job(shards=2, learners=1, interruptible=True), []

    def stops() -> None:
        job.answers(0, [-1])
        job.receive(0)

    def is_later() -> None:
        job.answers(1, [0])
        job.shards[1].notify([0], 1)
        job.receive(1)

    def learner() -> None:
        channel = job.learners[0]
        assert channel.pull(0).stop
        channel.goodbye(ending=Ending.FINISHED)
        job.wires[2].sleep(1.0)
        seen.append(interrupted(channel))

    job.run({0: stops, 1: is_later, 2: learner})
    assert seen == [False]


def test_the_time_of_a_pull_is_told_apart() -> None:
    """Until the first answer begins (the shard sleeps), and from there until all weights are in place (the link is slow)."""
    job = Job(shards=2, learners=1, network=NetworkOptions(latency_s=0.0, overhead_s=0.0, bandwidth=12.0, node_bandwidth=1e18))

    def shard(number: int) -> None:
        job.wires[number].sleep(2.0)
        job.answers(number, [0])

    answers: list[Answers] = []
    job.run({0: lambda: shard(0), 1: lambda: shard(1), 2: lambda: answers.append(job.learners[0].pull(0))})
    assert (answers[0].clocks, answers[0].stop) == ((0, 0), False)
    waited = (job.learners[0]._wait_ns, job.learners[0]._pull_ns)
    assert waited == (2 * 10**9, 2 * 10**9), "two slices of 12 bytes, one after the other"


@pytest.mark.parametrize(
    ("shard", "clock", "stop", "nbytes", "weights"),
    [
        (1, 5, 0, SLICE, SIZE),  # another shard
        (0, 4, 0, SLICE, SIZE),  # older than was asked for
        (0, 5, 0, SLICE - 4, SIZE - 1),  # short
        (0, 5, 0, 0, 0),
        (0, 5, 1, SLICE, SIZE),  # stop, and yet weights
        (0, 5, 4, 0, 0),  # an ending that there is not: its goodbye would be refused, and the job hang
    ],
)
def test_an_answer_that_cannot_be(shard: int, clock: int, stop: int, nbytes: int, weights: int) -> None:
    job = Job(learners=1)

    def answers() -> None:
        job.receive()
        wire = job.wires[0]
        wire.finish(wire.start(1, Tag.ANSWER, (shard, clock, stop, 0, 0, -1, nbytes), np.ones(weights, np.float32)))

    with pytest.raises(PeerError, match=r"ANSWER of rank 0: shard .* expected shard 0, \d+ bytes, clock >= 5"):
        job.run({0: answers, 1: lambda: job.learners[0].pull(min_clock=5)})  # type: ignore[dict-item, return-value]


def test_an_answer_of_notices_that_were_not_sent() -> None:
    job = Job(learners=1)

    def answers() -> None:
        job.receive()
        wire = job.wires[0]
        wire.finish(wire.start(1, Tag.ANSWER, (0, 5, 0, 0, 1, -1, SLICE), np.ones(SIZE, np.float32)))

    with pytest.raises(PeerError, match="ANSWER of rank 0: more notices than it can have sent"):
        job.run({0: answers, 1: lambda: job.learners[0].pull(min_clock=5)})  # type: ignore[dict-item, return-value]


# ------------------------------------------------------------------------------------------------------------ evaluator


def evaluates(job: Job, averaged: bool = False) -> tuple[EvaluatorChannel, np.ndarray, np.ndarray]:
    theta, thetabar = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    wire = job.wires[job.roles.evaluator_rank]
    return (
        EvaluatorChannel(wire, job.roles, weights=theta, averaged=thetabar if averaged else None, bounds=job.bounds),
        theta,
        thetabar,
    )


@pytest.mark.parametrize("averaged", [False, True])
def test_a_snapshot_comes_slice_by_slice(averaged: bool) -> None:
    job = Job(shards=2, learners=1, evaluator=True)
    channel, theta, thetabar = evaluates(job, averaged)

    def shard(number: int) -> None:
        for there in (True, number == 0):
            job.receive(number)
            size = 3 if there else 0
            vectors = [np.full(size, 1 + number + 10 * kind, np.float32) for kind in range(1 + averaged)]
            job.shards[number].answer_snapshot(vectors, 40 + number, 100 + number, 2.5 + number)
        job.receive(number)

    def evaluator() -> None:
        assert channel.pull(FINAL) == (FINAL, (40, 41), 100, 2.5)
        assert theta.tolist() == [1, 1, 1, 2, 2, 2]
        assert thetabar.tolist() == ([11, 11, 11, 12, 12, 12] if averaged else [0] * 6)
        assert channel.pull(4) is None
        channel.goodbye()

    job.run({0: lambda: shard(0), 1: lambda: shard(1), 3: evaluator})
    numbers = (FINAL, 4, NOTHING_MORE)
    assert job.received == [(shard, SnapshotPull(number)) for number in numbers for shard in range(2)]
    assert job.wires[3].unmet.total() == 0


@pytest.mark.parametrize(
    ("shard", "there", "clock", "nbytes"), [(1, 1, 1, 24), (0, 1, 1, 20), (0, 0, 1, 24), (0, 1, 1, 0), (0, 1, -5, 24)]
)
def test_a_snapshot_that_cannot_be(shard: int, there: int, clock: int, nbytes: int) -> None:
    job = Job(learners=1, evaluator=True)
    channel, _, _ = evaluates(job)

    def answers() -> None:
        job.receive()
        wire = job.wires[0]
        wire.finish(wire.start(2, Tag.SNAPSHOT_ANSWER, (shard, there, clock, 1, 1, nbytes), np.ones(SIZE, np.float32)))

    with pytest.raises(PeerError, match=r"snapshot 0 of rank 0: (shard|clock -5)"):
        job.run({0: answers, 2: lambda: channel.pull(0)})  # type: ignore[dict-item, return-value]


# ------------------------------------------------------------------------------------------- bytes, over the real wire

real = wire_without_mpi()


def header(tag: int, *fields: float) -> bytes:
    return LAYOUTS[tag].pack(fields)


def a_push(learner_id: int = 0, nbytes: int = SLICE, gradients: int = 1) -> bytes:
    return header(Tag.PUSH, learner_id, 0, 0, 0, gradients, *(0,) * 6, nbytes, -1, 0.0, 1.0, 0.5)


class Door:
    """Shard 0 of a job of two learners and an evaluator, ranks 1 to 3, behind the real wire; anything may lie before it."""

    def __init__(self, polite: bool = False) -> None:
        self.comm = Comm()
        self.wire = real.Wire(self.comm, polite=polite)
        self.shard = ShardChannel(self.wire, packed(1, 2, evaluator=True), 0)
        self.scratch = np.full(SIZE, 5.0, np.float32)

    def comes(self, source: int, tag: int, payload: bytes | np.ndarray) -> None:
        self.comm.inbox.append(Envelope(source, tag, payload if isinstance(payload, bytes) else payload.tobytes()))

    def receive(self, learner_id: int | None = None) -> Message:
        return self.shard.receive(self.scratch, learner_id)


@pytest.mark.parametrize("polite", [False, True])
def test_valid_messages_pass_whole(polite: bool) -> None:
    """So that the refusals below are for what they say; and pulls go first."""
    door = Door(polite)
    door.comes(1, Tag.PUSH, header(Tag.PUSH, 0, 3, 11, 16, 1, 1, 2, 3, 4, 5, 6, SLICE, 7, 0.25, 8.0, 0.125))
    door.comes(1, Tag.GRADIENT, np.arange(SIZE, dtype=np.float32))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 3, 1))
    door.comes(3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 3, 0))
    door.comes(2, Tag.PULL, header(Tag.PULL, 1, 7))
    assert told(door.receive()) == (Pull, 1, 7)
    assert told(door.receive()) == (Push, 0, 3, 11, 16, 1, 1, 2, 3, 4, 5, 6, SLICE, 7, 0.25, 8.0, 0.125)
    assert door.scratch.tolist() == list(range(SIZE))
    assert [door.receive(), door.receive()] == [Goodbye(0, 3, Ending.FINISHED), SnapshotPull(3)]
    with pytest.raises(Stuck):
        door.receive()


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize("learner_id", [None, 1])
@pytest.mark.parametrize("until_s", [math.inf, 1e9])
def test_a_shard_hears_of_a_signal_once_however_busy_it_is(polite: bool, learner_id: int | None, until_s: float) -> None:
    door = Door(polite)
    door.comes(2, Tag.GOODBYE, header(Tag.GOODBYE, 1, 0, Ending.INTERRUPTED))
    door.wire.hear(10)
    received = [door.shard.receive(door.scratch, learner_id, until_s) for _ in range(2)]
    assert received == [Interrupt(10), Goodbye(1, 0, Ending.INTERRUPTED)]
    with pytest.raises(Stuck):
        door.receive()


@pytest.mark.parametrize("polite", [False, True])
def test_a_signal_ends_a_shards_waiting(polite: bool) -> None:
    door = Door(polite)
    probe = door.comm.Improbe
    asked = 0

    def improbe(source: int, tag: int, status: Any) -> Envelope | None:
        nonlocal asked
        asked += 1
        if asked == 50:
            door.wire.hear(12)
        return probe(source, tag, status) if door.comm.inbox else None

    door.comm.Improbe = improbe  # type: ignore[method-assign]
    assert door.receive() == Interrupt(12)


def test_a_signal_that_another_rank_tells_of_is_taken_from_anybody() -> None:
    door = Door()
    for source in (2, 3):
        door.comes(source, Tag.INTERRUPT, header(Tag.INTERRUPT, 15))
    assert [door.receive(learner_id=0), door.receive()] == [Interrupt(15), Interrupt(15)]


def test_a_shard_that_waits_for_one_learner_sees_pulls_of_all() -> None:
    door = Door()
    door.comes(2, Tag.PUSH, a_push(1))
    door.comes(3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 3, 0))
    door.comes(2, Tag.PULL, header(Tag.PULL, 1, 4))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1))
    assert [told(door.receive(0)) for _ in range(3)] == [(Goodbye, 0, 0, True), (Pull, 1, 4), (SnapshotPull, 3, 0)]
    assert [envelope.tag for envelope in door.comm.inbox] == [Tag.PUSH]


@pytest.mark.parametrize(
    ("source", "tag", "payload", "message"),
    [
        (1, Tag.PUSH, b"\0" * 8, "PUSH from rank 1: 8 bytes, expected 136"),
        (1, Tag.PUSH, a_push(0) + b"\0" * 8, "PUSH from rank 1: 144 bytes, expected 136"),
        (1, Tag.PULL, b"", "PULL from rank 1: 0 bytes, expected 24"),
        (1, Tag.PUSH, b"\0" * 136, f"rank 1 sent magic 0x0: expected {MAGIC:#x}; another program or version"),
        (1, Tag.PULL, b"\xff" * 24, "rank 1 sent magic -0x1"),
        (
            1,
            Tag.GRADIENT,
            b"\0" * 24,
            "rank 1 sent GRADIENT, 24 bytes: expected one of PUSH, PULL, ANSWER, GOODBYE, NOTICE, GAVE_UP, INTERRUPT, ROUND, DUTY",
        ),
        (1, Tag.WEIGHTS, b"\0" * 24, "rank 1 sent WEIGHTS, 24 bytes: expected one of"),
        (1, 77, b"\0" * 24, "rank 1 sent tag 77, 24 bytes: expected one of"),
        (1, Tag.LOST, b"\0" * 24, "rank 1 sent LOST, 24 bytes: expected one of"),
        (1, Tag.STUCK, b"\0" * 24, "rank 1 sent STUCK, 24 bytes: expected one of"),
        (1, Tag.DUTY, header(Tag.DUTY, 0), "rank 1 sent DUTY to a shard"),
        (1, Tag.GAVE_UP, header(Tag.GAVE_UP, NOBODY, 0), "rank 1 says it is learner -2"),
        (3, Tag.PUSH, a_push(-1), "rank 3 says it is learner -1"),
        (1, Tag.INTERRUPT, header(Tag.INTERRUPT, 9), "rank 1 tells of signal 9: expected one of SIGTERM, SIGUSR1, SIGUSR2"),
        (
            1,
            Tag.ANSWER,
            header(Tag.ANSWER, *ZERO),
            "rank 1 sent ANSWER to a shard: expected PUSH, PULL, GOODBYE, GAVE_UP, INTERRUPT or SNAPSHOT_PULL",
        ),
        (1, Tag.SNAPSHOT_ANSWER, header(Tag.SNAPSHOT_ANSWER, *(0,) * 6), "rank 1 sent SNAPSHOT_ANSWER to a shard"),
        (1, Tag.PUSH, a_push(1), "rank 1 says it is learner 1: it is not"),
        (1, Tag.PUSH, a_push(-1), "rank 1 says it is learner -1"),
        (2, Tag.PULL, header(Tag.PULL, 0, 0), "rank 2 says it is learner 0"),
        (3, Tag.PUSH, a_push(0), "rank 3 says it is learner 0"),
        (0, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1), "rank 0 says it is learner 0"),
        (1, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 0, 0), "rank 1 pulled a snapshot: only rank 3"),
        (3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, -3, 0), "rank 3 pulled snapshot -3: expected -2 or more"),
        (3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 0, -1), "rank 3 has seen enough at snapshot -2: expected 0 or more"),
        (1, Tag.PUSH, a_push(0, nbytes=20), "push of rank 1: a slice of 20 bytes, expected 24"),
        (1, Tag.PUSH, a_push(0, gradients=2), "push of rank 1: 2 gradients, expected 1"),
        (1, Tag.PUSH, a_push(0, nbytes=-24), "a slice of -24 bytes, expected 24"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_applied(source: int, tag: int, payload: bytes, message: str) -> None:
    door = Door()
    door.comes(source, tag, payload)
    found = door.receive()
    assert isinstance(found, Refused)
    assert found.rank == source
    assert re.search(message, found.why)
    assert (door.scratch == 5).all()
    assert not door.comm.inbox, "it is gone, and does not hold up its sender"


def test_a_header_without_its_slice_holds_up_nobody() -> None:
    """What one rank sends comes in order: so another message in the slice's place says that none comes."""
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 1, 1))
    found = door.receive()
    assert isinstance(found, Refused)
    assert found.push
    assert "no GRADIENT after it: GOODBYE came" in found.why
    assert door.receive() == Goodbye(0, 1, True)


def test_a_slice_whose_header_was_refused_is_dropped_by_itself() -> None:
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0, nbytes=20))
    door.comes(1, Tag.GRADIENT, np.full(SIZE, np.nan, np.float32))
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GRADIENT, np.ones(SIZE, np.float32))
    first, second = door.receive(), door.receive()
    assert [isinstance(each, Refused) and each.push for each in (first, second)] == [True, False]
    assert told(door.receive())[0] is Push
    assert door.scratch.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_slice_of_another_size_than_its_header_says_is_not_received(size: int) -> None:
    """A longer one would overwrite memory, a shorter one would pass (TRAPS 9)."""
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GRADIENT, np.ones(size, np.float32))
    found = door.receive()
    assert isinstance(found, Refused)
    assert f"GRADIENT from rank 1: {4 * size} bytes, expected 24" in found.why
    assert (door.scratch == 5).all()


def test_a_message_that_was_posted_must_have_the_magic_number() -> None:
    """Its size is MPI's business: it fails a receive that is too small."""
    door = Door()
    door.comes(1, Tag.ANSWER, struct.pack("<8q", 0x1234, *ZERO))
    with pytest.raises(PeerError, match=f"rank 1 sent magic 0x1234: expected {MAGIC:#x}"):
        door.wire.header(door.wire.post(1, Tag.ANSWER))


def tolerant_door(shard: int, evaluator: bool) -> Door:
    """Of two shards, ranks 0 and 1; learners are ranks 2 and 3, the evaluator, where there is one, rank 4."""
    door = Door()
    door.shard = TolerantShardChannel(door.wire, packed(2, 2, evaluator=evaluator), shard)
    return door


def pulls_a_snapshot(door: Door, source: int, number: int) -> bool:
    """Whether it is believed."""
    door.comes(source, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, number, 0))
    return door.receive() == SnapshotPull(number)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("number", [3, FINAL, NOTHING_MORE])
def test_a_learner_that_was_not_appointed_pulls_no_snapshot(shard: int, number: int) -> None:
    for evaluator in (False, True):
        door = tolerant_door(shard, evaluator)
        assert not pulls_a_snapshot(door, 2, number)
        assert not pulls_a_snapshot(door, 3, number)


def test_snapshots_are_of_whom_shard_0_has_appointed() -> None:
    first, other = tolerant_door(0, evaluator=True), tolerant_door(1, evaluator=True)
    for door in (first, other):
        assert pulls_a_snapshot(door, 4, 0)
    first.shard._evaluator_rank = 3  # as `answer_goodbye` has it
    other.shard.has_parted(1)
    for door in (first, other):
        assert pulls_a_snapshot(door, 3, 0)
        assert door.shard.evaluator_rank == 3
        assert not pulls_a_snapshot(door, 2, 0)
    assert not pulls_a_snapshot(first, 4, NOTHING_MORE)
    assert pulls_a_snapshot(first, 3, NOTHING_MORE)
    assert not pulls_a_snapshot(other, 3, NOTHING_MORE), "shard 0 passes it on"
    assert pulls_a_snapshot(other, 0, NOTHING_MORE)


@pytest.mark.parametrize("ending", [-1, 4, 2**40])
def test_no_learner_leaves_for_an_unknown_reason(ending: int) -> None:
    assert refused(Door(), 1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 3, ending))


VALID = {
    Tag.PUSH: a_push(0),
    Tag.PULL: header(Tag.PULL, 0, 3),
    Tag.GOODBYE: header(Tag.GOODBYE, 0, 3, 1),
    Tag.SNAPSHOT_PULL: header(Tag.SNAPSHOT_PULL, 3, 0),
}


def refused(door: Door, source: int, tag: int, payload: bytes) -> bool:
    door.comm.inbox.clear()
    door.comes(source, tag, payload)
    try:
        return isinstance(door.receive(), Refused)
    except Stuck:  # taken for a push: it waits for the gradient
        return False


def test_ten_thousand_malformed_headers_never_pass() -> None:
    """Random bytes of the right size, and valid headers with one bit of magic, name or size turned."""
    random, door = np.random.default_rng(0), Door()
    checked = {Tag.PUSH: [*range(16), *range(40, 48), *range(96, 104)], Tag.SNAPSHOT_PULL: range(8)}
    for count in range(10_000):
        tag = list(VALID)[count % 4]
        source = 3 if tag is Tag.SNAPSHOT_PULL else 1
        payload = bytearray(VALID[tag])
        if count % 8 < 4:
            payload[:] = random.bytes(len(payload))
        else:
            places = checked.get(tag, range(16))
            payload[random.choice(list(places))] ^= 1 << int(random.integers(8))
        assert refused(door, source, tag, bytes(payload)), (tag, payload)
    for tag, valid in VALID.items():
        assert not refused(door, 3 if tag is Tag.SNAPSHOT_PULL else 1, tag, valid)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(source=st.integers(0, 4), tag=st.integers(0, 12), payload=st.binary(max_size=120))
def test_no_bytes_from_anybody_pass(source: int, tag: int, payload: bytes) -> None:
    assert refused(Door(), source, tag, payload)


@pytest.mark.parametrize("polite", [False, True])
def test_an_announced_header_is_synchronous_however_a_rank_waits(polite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen twice with eager ones: pulls overtook their own pushes and starved them, staleness 72 with 3 learners."""
    for name in ("MPISGD_WAIT", "MPISGD_SSEND", "MPISGD_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    slice_ = np.ones(SIZE, np.float32)
    for synchronous, plain in ((False, "Isend"), (True, "Issend")):
        monkeypatch.setenv("MPISGD_SSEND", str(int(synchronous)))
        wire = real.Wire(comm := Comm(), polite=polite)
        push = (0,) * 11 + (SLICE, -1, 0.0, 1.0, 0.5)
        wire.finish(wire.start(1, Tag.PUSH, push, slice_))
        wire.finish(wire.start(1, Tag.PULL, (0, 0)))
        wire.finish(wire.start(1, Tag.GOODBYE, (0, 0, 1)))
        assert comm.sent == [
            ("Issend", 1, Tag.PUSH, header(Tag.PUSH, *push)),
            (plain, 1, Tag.GRADIENT, slice_.tobytes()),
            (plain, 1, Tag.PULL, header(Tag.PULL, 0, 0)),
            ("Issend", 1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1)),
        ]


def test_an_answer_goes_out_as_it_is_received() -> None:
    """What one real wire sends, another unpacks: header, weights, and the empty slice of a stop."""
    door, weights = Door(), np.arange(SIZE, dtype=np.float32)
    door.shard.start_answers([1], weights, 3, {1: 2})
    door.shard.finish_answers()
    door.shard.stop(0, 9, Ending.FINISHED)
    assert [(dest, tag) for _, dest, tag, _ in door.comm.sent] == [
        (2, Tag.ANSWER), (2, Tag.WEIGHTS), (1, Tag.ANSWER), (1, Tag.WEIGHTS)
    ]  # fmt: skip
    learner = real.Wire(comm := Comm(), polite=False)
    comm.inbox = [Envelope(0, tag, payload) for _, _, tag, payload in door.comm.sent]
    pulled = np.zeros(SIZE, np.float32)
    for expected in ((0, 3, 0, 2, 0, -1, SLICE), (0, 9, 1, 0, 0, -1, 0)):
        posted = learner.post(0, Tag.ANSWER, pulled)
        assert learner.header(posted) == expected
        learner.finish(posted)
        assert pulled.tolist() == weights.tolist()


@pytest.mark.parametrize("polite", [False, True])
def test_a_question_is_sent_once_its_answer_has_a_place(polite: bool) -> None:
    wire, pulled = real.Wire(comm := Comm(), polite=polite), np.zeros(SIZE, np.float32)
    with pytest.raises(Stuck):
        wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    assert comm.sent == [], "the receive goes first"
    weights = np.arange(SIZE, dtype=np.float32)
    comm.inbox = [
        Envelope(1, Tag.ANSWER, header(Tag.ANSWER, 0, 7, 0, 0, 0, -1, SLICE)),
        Envelope(1, Tag.WEIGHTS, weights.tobytes()),
    ]
    asked = wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    assert [sent[1:] for sent in comm.sent] == [(1, Tag.PULL, header(Tag.PULL, 0, 7))]
    assert wire.header(asked) == (0, 7, 0, 0, 0, -1, SLICE)
    wire.finish(asked)
    assert pulled.tolist() == weights.tolist()


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize(
    ("more", "slice_nbytes", "told", "message"),
    [
        (b"\0", SLICE, SLICE, "ANSWER from rank 1: its header is longer than expected"),
        (b"", SLICE + 4, SLICE, "ANSWER from rank 1: its body is longer than expected"),
        (b"", SLICE - 4, SLICE, f"WEIGHTS from rank 1: {SLICE - 4} bytes, expected {SLICE}"),
        (b"", 0, SLICE, f"WEIGHTS from rank 1: 0 bytes, expected {SLICE}"),
        (b"", SLICE, 0, f"WEIGHTS from rank 1: {SLICE} bytes, expected 0"),
    ],
)
def test_an_answer_of_another_size_is_refused(polite: bool, more: bytes, slice_nbytes: int, told: int, message: str) -> None:
    """MPI would fill what there is of a shorter one, and raise an error of its own for a longer one."""
    wire, pulled = real.Wire(comm := Comm(), polite=polite), np.zeros(SIZE, np.float32)
    comm.inbox = [
        Envelope(1, Tag.ANSWER, header(Tag.ANSWER, 0, 7, 0, 0, 0, -1, told) + more),
        Envelope(1, Tag.WEIGHTS, bytes(slice_nbytes)),
    ]
    asked = wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    with pytest.raises(PeerError, match=message):
        wire.header(asked)
        wire.finish(asked)


def test_both_worlds_have_the_methods_of_the_communicator() -> None:
    named = [name for name, value in vars(Communicator).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert {"start", "post", "ask", "header", "finish", "take", "take_body", "meet"} < set(named)
    for name in named:
        expected = list(inspect.signature(getattr(Communicator, name)).parameters)
        assert list(inspect.signature(getattr(VirtualWire, name)).parameters) == expected
        assert list(inspect.signature(getattr(real.Wire, name)).parameters) == expected
