"""Virtual time goes on in order, the same way each time; and where it cannot go on, the error says who waits for whom."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import DeadlockError
from mpisgd.comm.messages import Ending, Goodbye, Pull, Tag
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.body import Pool
from tests.virtual.scene import Scene, WatchedWire, packed

Steps = list[list[int]]
SLOW = NetworkOptions(latency_s=1e-6, overhead_s=1e-7, bandwidth=1e8, node_bandwidth=1e8)
ANYTHING = ((None, None),)
NOBODY = (0,) * 5

# ----------------------------------------------------------------------------------------------------------- order of time


def walked(steps: Steps, together: bool = True) -> list[tuple[int, int]]:
    """(nanosecond, rank) in the order in which ranks got there, each sleeping for its steps one after the other."""
    scene, seen = Scene(len(steps)), list[tuple[int, int]]()

    def walk(rank: int) -> None:
        if together:
            scene.wires[rank].meet()
        for step in steps[rank]:
            scene.wires[rank].sleep(step * 1e-9)
            scene.cluster.until_first(scene.wires[rank])
            seen.append((scene.wires[rank].now_ns(), rank))

    scene.run({rank: lambda rank=rank: walk(rank) for rank in range(len(steps))})  # type: ignore[misc]
    return seen


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6))
def test_ranks_that_wait_for_their_turn_go_on_in_the_order_of_time(steps: Steps) -> None:
    seen = walked(steps)
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)
    assert walked(steps) == seen
    for rank, own in enumerate(steps):
        assert [now for now, who in seen if who == rank] == np.cumsum(own).tolist()


def test_that_holds_without_a_barrier_at_the_start() -> None:
    assert walked([[1], [0]], together=False) == [(0, 1), (1, 0)]


def test_at_one_nanosecond_ranks_go_in_their_order_whoever_planned_it_first() -> None:
    """Rank 2 says at 0 that it goes on at 5; rank 1 says so at 2, rank 0 at 4."""
    assert walked([[4, 1], [2, 3], [5]]) == [(2, 1), (4, 0), (5, 0), (5, 1), (5, 2)]


def test_all_leave_a_barrier_at_the_time_of_the_last() -> None:
    scene, times = Scene(5), list[int]()

    def main(rank: int) -> None:
        for turn in range(3):
            scene.wires[rank].sleep((rank + turn) % 5 * 1e-6)
            scene.wires[rank].meet()
            times.append(scene.wires[rank].now_ns())

    scene.run({rank: lambda rank=rank: main(rank) for rank in range(5)})  # type: ignore[misc]
    assert times == [4000] * 5 + [8000] * 5 + [12000] * 5
    assert sorted(scene.left) == list(range(5))


def test_a_failing_rank_ends_the_run_with_its_own_exception() -> None:
    scene = Scene(3)

    def main() -> None:
        scene.wires[1].sleep(1.0)
        raise ZeroDivisionError("rank 1's")

    waits = {rank: scene.wires[rank].meet for rank in (0, 2)}
    with pytest.raises(ZeroDivisionError, match="rank 1's"):
        scene.run({1: main, **waits})
    assert scene.left == []


def test_a_thousand_ranks_pass_a_message_round() -> None:
    """Each waits for its neighbour: deep chains of waiting need no deep stack."""
    size = 1000
    scene = Scene(size, network=SLOW)

    def main(rank: int) -> None:
        wire = scene.wires[rank]
        if rank:
            assert wire.take(ANYTHING) == (rank - 1, Tag.PULL, (rank - 1, 0))
        if rank < size - 1:
            wire.finish(wire.start(rank + 1, Tag.PULL, (rank, 0)))

    scene.run({rank: lambda rank=rank: main(rank) for rank in range(size)})  # type: ignore[misc]
    assert scene.wires[-1].now_ns() == (size - 1) * (100 + 1000 + 100)


# --------------------------------------------------------------------------------------------------------------- deadlock


def stuck(scene: Scene, mains: dict[int, Callable[[], object]]) -> str:
    with pytest.raises(DeadlockError) as caught:
        scene.run(mains)  # type: ignore[arg-type]
    return str(caught.value)


def test_two_ranks_that_send_to_each_other() -> None:
    """Nothing is buffered: not even a header without a body."""
    scene = Scene(3)
    a, b, _ = scene.wires
    text = stuck(
        scene, {0: lambda: a.finish(a.start(1, Tag.PULL, (0, 0))), 1: lambda: b.finish(b.start(0, Tag.GOODBYE, (0, 0, 0)))}
    )
    assert text.splitlines() == [
        "no virtual rank can go on:",
        "rank 0 (somebody 0) sends PULL to rank 1, but rank 1 has posted no receive",
        "rank 1 (somebody 1) sends GOODBYE to rank 0, but rank 0 has posted no receive",
        "in a circle: rank 0 (somebody 0) -> rank 1 (somebody 1) -> rank 0 (somebody 0)",
    ]
    assert scene.left == [2]


def test_one_that_waits_for_somebody_who_has_left() -> None:
    scene = Scene(4)
    a, b, c, _ = scene.wires
    text = stuck(
        scene,
        {
            0: lambda: a.header(a.post(3, Tag.ANSWER)),
            1: lambda: b.take(ANYTHING),
            2: lambda: c.take(((3, Tag.PUSH), (3, Tag.PULL))),
        },
    )
    assert text.splitlines()[1:] == [
        "rank 0 (somebody 0) waits for ANSWER of rank 3",
        "rank 1 (somebody 1) waits for anything",
        "rank 2 (somebody 2) waits for PUSH or PULL",
    ]


def test_a_send_to_somebody_who_has_left() -> None:
    scene = Scene(2)
    wire = scene.wires[0]
    sends = {0: lambda: wire.finish(wire.start(1, Tag.ANSWER, NOBODY, np.zeros(3)))}
    assert "rank 0 (somebody 0) sends ANSWER to rank 1, but rank 1 has posted no receive" in stuck(scene, sends)


def test_a_receive_of_another_message_than_is_sent() -> None:
    """Another tag, then another source: both of the latter wait for rank 0, who waits too."""
    scene = Scene(3)
    a, b, c = scene.wires
    text = stuck(
        scene,
        {
            0: lambda: a.finish(a.start(1, Tag.PULL, (0, 0))),
            1: lambda: b.header(b.post(0, Tag.ANSWER)),
            2: lambda: c.header(c.post(0, Tag.PULL)),
        },
    )
    assert "in a circle: rank 0 (somebody 0) -> rank 1 (somebody 1) -> rank 0 (somebody 0)" in text
    assert "rank 2 (somebody 2) waits for PULL of rank 0" in text


def test_a_barrier_that_one_never_reaches() -> None:
    scene = Scene(4)
    wires = scene.wires
    text = stuck(scene, {0: wires[0].meet, 2: wires[2].meet, 3: lambda: wires[3].take(((0, Tag.PUSH),))})
    assert text.count("is at the barrier, where 2 ranks are missing") == 2
    assert "rank 3 (somebody 3) waits for PUSH" in text


def test_a_crowd_that_waits_is_not_printed_whole() -> None:
    scene = Scene(40)
    lines = stuck(scene, {rank: lambda wire=scene.wires[rank]: wire.take(ANYTHING) for rank in range(40)}).splitlines()  # type: ignore[misc]
    assert len(lines) == 1 + 12 + 1
    assert lines[-1] == "... and 28 more"


# ------------------------------------------------------- a protocol that deadlocks: push implies reply, over rendezvous sends

SHARDS, LEARNERS, BATCHES, SCHEDULES = 2, 3, 4, 300


class Schedule:
    """Two shards and three learners, whose compute seconds, and whose orders of pushing, are drawn."""

    def __init__(self, seed: int, orders: str) -> None:
        self.random = random.Random(seed)
        self.orders = orders
        self.roles = packed(SHARDS, LEARNERS)
        self.scene = Scene(SHARDS + LEARNERS, network=SLOW, name=self.roles.describe, wire=WatchedWire)
        self.gradient = np.ones(10, np.float32)

    def order(self, learner_id: int) -> list[int]:
        shards = list(range(SHARDS))
        if self.orders == "drawn":
            self.random.shuffle(shards)
        return shards

    def seconds(self) -> float:
        return self.random.expovariate(1e4)


def push_implies_reply(schedule: Schedule) -> None:
    """A shard answers a push with weights at once; a learner pushes to one shard after the other, then takes the weights."""
    scene = schedule.scene

    def shard(rank: int) -> None:
        wire, scratch = scene.wires[rank], np.zeros(10, np.float32)
        for _ in range(LEARNERS * BATCHES):
            source, _, _ = wire.take(((None, Tag.PUSH),))
            wire.take_body(scratch)
            wire.finish(super(WatchedWire, wire).start(source, Tag.ANSWER, NOBODY, scratch))

    def learner(learner_id: int) -> None:
        wire = scene.wires[SHARDS + learner_id]
        for _ in range(BATCHES):
            wire.clock.sleep(schedule.seconds())
            for dest in schedule.order(learner_id):
                wire.finish(wire.start(dest, Tag.PUSH, (0,) * 11, schedule.gradient))
            for source in range(SHARDS):
                wire.finish(wire.post(source, Tag.ANSWER, np.zeros(10, np.float32)))

    scene.run(mains(shard, learner))


def the_projects_channel(schedule: Schedule) -> None:
    """The same pattern as `learner_channel.py` does it, law 1 watched: push to all, then ask, receives posted before."""
    scene, roles, bounds = schedule.scene, schedule.roles, [(0, 10), (0, 10)]

    def shard(rank: int) -> None:
        channel, scratch, left = ShardChannel(scene.wires[rank], roles, rank), np.zeros(10, np.float32), LEARNERS
        while left:
            match channel.receive(Pool(scratch)):
                case Pull(learner_id=learner_id):
                    channel.start_answers([learner_id], scratch, 0, {})
                    channel.finish_answers()
                case Goodbye(pushed=pushed):
                    assert pushed == BATCHES
                    left -= 1

    def learner(learner_id: int) -> None:
        wire = scene.wires[SHARDS + learner_id]
        weights = np.zeros(10, np.float32)
        channel = LearnerChannel(wire, roles, learner_id, Slices(weights, schedule.gradient, bounds), consistent=False)
        channel.pull(0)
        for seq in range(BATCHES):
            wire.clock.sleep(schedule.seconds())
            channel.push(Report(seq, samples=1, loss=0.0, compute_ns=0, delay_ns=0))
            channel.pull(0)
        channel.goodbye(ending=Ending.FINISHED)

    scene.run(mains(shard, learner))


def mains(shard: Callable[[int], None], learner: Callable[[int], None]) -> dict[int, Callable[[], None]]:
    return {
        **{rank: lambda rank=rank: shard(rank) for rank in range(SHARDS)},  # type: ignore[misc]
        **{SHARDS + each: lambda each=each: learner(each) for each in range(LEARNERS)},  # type: ignore[misc]
    }


def deadlocks(pattern: Callable[[Schedule], None], orders: str) -> Iterator[str]:
    """What was said of those of 300 random schedules that could not go on; all others ended."""
    for seed in range(SCHEDULES):
        schedule = Schedule(seed, orders)
        try:
            pattern(schedule)
        except DeadlockError as error:
            yield str(error)
        else:
            assert len(schedule.scene.left) == SHARDS + LEARNERS


def test_push_implies_reply_deadlocks_now_and_then_and_the_circle_is_printed() -> None:
    """[TRAPS: 22 of 300 with two shards.] A shard sends to a learner that sends to the other shard, and crosswise."""
    found = list(deadlocks(push_implies_reply, "drawn"))
    assert 10 < len(found) < 100
    learner, shard = r"rank [234] \(learner [012]\)", r"rank [01] \(shard [01]\)"
    for text in found:
        last = text.splitlines()[-1]
        assert re.fullmatch(rf"in a circle: (({shard} -> {learner} -> )+{shard}|({learner} -> {shard} -> )+{learner})", last)
        circle = re.findall(r"rank (\d)", last)
        assert circle[0] == circle[-1]
        assert len(set(circle)) == len(circle) - 1 == 4
        assert len(re.findall(rf"^{shard} sends ANSWER to rank ([234]), but rank \1 has posted no receive$", text, re.M)) == 2
        assert len(re.findall(rf"^{learner} sends PUSH to rank ([01]), but rank \1 has posted no receive$", text, re.M)) >= 2


def test_push_implies_reply_in_one_order_of_shards_does_not() -> None:
    assert list(deadlocks(push_implies_reply, "one")) == []


def test_the_projects_own_channel_never_does() -> None:
    assert list(deadlocks(the_projects_channel, "drawn")) == []
