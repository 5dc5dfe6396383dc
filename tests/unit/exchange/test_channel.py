"""Push, pull and stop: what arrives is what was sent, and nobody blocks on whom he must not.

Over the virtual cluster's wires, whose sends all block until they are taken (law 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import DeadlockError, PeerError
from mpisgd.comm.messages import (
    LAYOUTS,
    Ending,
    Goodbye,
    Pull,
    Push,
    SnapshotPull,
    Tag,
)
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.exchange.exchange import Answers, Interrupted, Report
from mpisgd.exchange.learner_channel import LearnerChannel
from tests.unit.channels import SIZE, SLICE, Job, told
from tests.virtual.scene import FREE

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
        assert told(push) == (Push, 2, timestamp, 11, 16, 1, 3, 4, 7, *waited[0], 6, SLICE // 2, -1, 0, 0.25, 8.0, 0.125)
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
        wire.finish(wire.start(1, Tag.ANSWER, (shard, clock, stop, 0, 0, -1, 1, nbytes), np.ones(weights, np.float32)))

    with pytest.raises(PeerError, match=r"ANSWER of rank 0: shard .* expected shard 0, \d+ bytes, clock >= 5"):
        job.run({0: answers, 1: lambda: job.learners[0].pull(min_clock=5)})  # type: ignore[dict-item, return-value]


def test_an_answer_of_notices_that_were_not_sent() -> None:
    job = Job(learners=1)

    def answers() -> None:
        job.receive()
        wire = job.wires[0]
        wire.finish(wire.start(1, Tag.ANSWER, (0, 5, 0, 0, 1, -1, 1, SLICE), np.ones(SIZE, np.float32)))

    with pytest.raises(PeerError, match="ANSWER of rank 0: more notices than this rank can have sent"):
        job.run({0: answers, 1: lambda: job.learners[0].pull(min_clock=5)})  # type: ignore[dict-item, return-value]
