"""Messages in virtual time: who is given what first, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import Tag
from mpisgd.vectors.memory import SizedVector
from tests.virtual.scene import ANSWER, ANYTHING, BODY, PULL, PUSH, Exchange, body

# ------------------------------------------------------------------------------------------------- who is given what first


def test_what_arrives_first_is_taken_first_whichever_rank_ran_first() -> None:
    """Rank 1's code runs before rank 2's, which sends earlier."""
    scene, order = Exchange(4), list[int]()

    def shard() -> None:
        scene.w[0].work(5000)
        order.extend(scene.w[0].take(ANYTHING)[0] for _ in range(3))

    delays = {1: 700, 2: 300, 3: 500}
    scene.run({0: shard, **{rank: scene.sends(rank, 0, Tag.PULL, PULL, after_ns=ns) for rank, ns in delays.items()}})
    assert order == [2, 3, 1]


def test_messages_of_all_kinds_are_taken_in_the_order_in_which_they_came() -> None:
    scene, order, kinds = Exchange(4), list[int](), {1: Tag.PULL, 2: Tag.GOODBYE, 3: Tag.SNAPSHOT_PULL}

    def sender(rank: int) -> Callable[[], None]:
        def main() -> None:
            for at_ns in (100 * rank, 20_000 - 100 * rank):
                scene.w[rank].work(at_ns - scene.w[rank].clock.now_ns())
                scene.w[rank].finish(scene.w[rank].start(0, kinds[rank], ()))

        return main

    def shard() -> None:
        for until_ns in (10_000, 30_000):
            scene.w[0].work(until_ns - scene.w[0].clock.now_ns())
            order.extend(scene.w[0].take(ANYTHING)[0] for _ in range(3))

    scene.run({0: shard, **{rank: sender(rank) for rank in kinds}})
    assert order == [1, 2, 3, 3, 2, 1]


def test_at_one_nanosecond_who_sent_first_is_taken_first() -> None:
    scene, order = Exchange(5), list[int]()

    def shard() -> None:
        order.extend(scene.w[0].take(ANYTHING)[0] for _ in range(4))

    scene.run({0: shard, **{rank: scene.sends(rank, 0, Tag.PULL, PULL) for rank in (1, 2, 3, 4)}})
    assert order == [1, 2, 3, 4]


@pytest.mark.parametrize("busy_ns", [0, 5000])
def test_patterns_are_asked_in_order_of_what_is_here(busy_ns: int) -> None:
    """A busy shard finds both and takes the pull; an idle one takes the push, which comes first."""
    scene, order = Exchange(3), list[int]()

    def shard() -> None:
        scene.w[0].work(busy_ns)
        for _ in range(2):
            _, tag, _ = scene.w[0].take(((None, Tag.PULL), (None, None)))
            order.append(tag)
            if tag == Tag.PUSH:
                scene.w[0].take_body(body())

    scene.run({0: shard, 1: scene.sends(1, 0, Tag.PUSH, PUSH, body()), 2: scene.sends(2, 0, Tag.PULL, PULL, after_ns=50)})
    assert order == ([Tag.PULL, Tag.PUSH] if busy_ns else [Tag.PUSH, Tag.PULL])


def test_a_shard_that_begins_to_wait_sees_what_came_meanwhile() -> None:
    """It is busy until 5000 and looks before anything has arrived: the push of 110 does not go before the pull of 4000."""
    scene, order = Exchange(3), list[int]()

    def shard() -> None:
        scene.w[0].work(5000)
        order.append(scene.w[0].take(((None, Tag.PULL), (None, None)))[1])
        scene.w[0].take(ANYTHING)
        scene.w[0].take_body(body())

    scene.run({0: shard, 1: scene.sends(1, 0, Tag.PUSH, PUSH, body()), 2: scene.sends(2, 0, Tag.PULL, PULL, after_ns=3890)})
    assert order == [Tag.PULL]


def test_a_shard_that_looks_at_what_lies_there_sees_what_came_meanwhile_too() -> None:
    """The push lies there since 110; when the shard looks, at 5000, the pull of 4000 is there as well, and goes first."""
    scene, order = Exchange(4), list[int]()

    def shard() -> None:
        scene.w[0].take(((3, None),))
        scene.w[0].work(5000 - scene.w[0].clock.now_ns())
        for _ in range(2):
            order.append(scene.w[0].take(((None, Tag.PULL), (None, None)))[1])
        scene.w[0].take_body(body())

    scene.run(
        {
            0: shard,
            1: scene.sends(1, 0, Tag.PUSH, PUSH, body()),
            2: scene.sends(2, 0, Tag.PULL, PULL, after_ns=3890),
            3: scene.sends(3, 0, Tag.GOODBYE, (0, 0, 0), after_ns=200),
        }
    )
    assert order == [Tag.PULL, Tag.PUSH]


def test_what_no_pattern_matches_is_left_for_later() -> None:
    scene = Exchange(4)
    taken: list[tuple[int, int]] = []

    def shard() -> None:
        for patterns in (((3, None), (None, Tag.GOODBYE)), ((2, None),), ((None, Tag.PULL),)):
            taken.append(scene.w[0].take(patterns)[:2])

    scene.run(
        {
            0: shard,
            1: scene.sends(1, 0, Tag.PULL, PULL),
            2: scene.sends(2, 0, Tag.PULL, PULL, after_ns=100),
            3: scene.sends(3, 0, Tag.GOODBYE, (0, 0, 0), after_ns=200),
        }
    )
    assert taken == [(3, Tag.GOODBYE), (2, Tag.PULL), (1, Tag.PULL)]


def test_messages_of_one_pair_do_not_overtake_each_other() -> None:
    """Posted, taken, or posted after they have come."""
    scene, got = Exchange(2), list[int]()

    def sender() -> None:
        under_way = [scene.w[0].start(1, Tag.PULL, (0, number)) for number in range(6)]
        for sending in under_way:
            scene.w[0].finish(sending)

    def receiver() -> None:
        wire = scene.w[1]
        early = [wire.post(0, Tag.PULL) for _ in range(2)]
        got.extend(wire.header(each)[1] for each in early)
        wire.work(10_000)
        got.extend(wire.take(((0, Tag.PULL),))[2][1] for _ in range(2))
        late = [wire.post(0, Tag.PULL) for _ in range(2)]
        got.extend(wire.header(each)[1] for each in late)

    scene.run({0: sender, 1: receiver})
    assert got == list(range(6))


# No channel meets this, since they all post before they ask. Rank 0's answer to rank 1, whose receive is posted for 1000 ns later,
# must not occupy the link out of rank 0 before the second answer, which can go at 240 ns.
def test_a_transfer_that_begins_later_does_not_hold_the_link_before() -> None:
    scene = Exchange(3)

    def shard() -> None:
        scene.w[0].take(ANYTHING)
        for sending in [scene.w[0].start(rank, Tag.ANSWER, ANSWER, body()) for rank in (1, 2)]:
            scene.w[0].finish(sending)

    def asks() -> None:
        posted = scene.w[2].post(0, Tag.ANSWER, body())
        scene.w[2].start(0, Tag.PULL, PULL)
        scene.w[2].finish(posted)
        scene.note(2, "2 has")

    scene.run({0: shard, 1: scene.posts(1, 0, Tag.ANSWER, body(), after_ns=1000), 2: asks})
    assert scene.times["2 has"] == 120 + 10 + 10 + 100 + 1000
    assert scene.times["1 has"] == scene.times["2 has"] + 1000


# ---------------------------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("posted", [False, True])
def test_a_body_for_which_there_is_no_room_is_refused(posted: bool) -> None:
    scene = Exchange(2)
    small = SizedVector(BODY // 4 - 1)
    receiver = scene.posts(1, 0, Tag.PUSH, small) if posted else scene.takes(1, small)
    with pytest.raises(PeerError, match="PUSH from rank 0: 1000 bytes, expected 996"):
        scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: receiver})


def test_an_empty_body_ends_a_receive() -> None:
    """That is how a shard says stop."""
    scene = Exchange(2)
    scene.run({0: scene.sends(0, 1, Tag.ANSWER, ANSWER, SizedVector(0)), 1: scene.posts(1, 0, Tag.ANSWER, body())})
    assert scene.times == {"0 begun": 10, "1 began": 110, "0 done": 110, "1 has": 110}


# ------------------------------------------------------------------------------------------------------------- repeatable


def chatter(seed: int) -> list[tuple[int, int, int, int]]:
    """(time, taker, source, number) of some hundred messages between six ranks that sleep at random, on two nodes."""
    scene, seen = Exchange(6, nodes=[0, 0, 0, 1, 1, 1]), list[tuple[int, int, int, int]]()
    drawn = random.Random(seed)
    plan = [(drawn.randrange(3), 3 + drawn.randrange(3), drawn.randrange(2000)) for _ in range(200)]

    def sender(rank: int) -> None:
        for number, (source, dest, ns) in enumerate(plan):
            if source == rank:
                scene.w[rank].work(ns)
                scene.w[rank].finish(scene.w[rank].start(dest, Tag.PULL, (0, number), SizedVector(ns)))

    def taker(rank: int) -> None:
        for _, dest, ns in plan:
            if dest == rank:
                source, _, (_, number) = scene.w[rank].take(ANYTHING)
                scene.w[rank].take_body(SizedVector(2000))
                scene.w[rank].work(ns)
                seen.append((scene.w[rank].clock.now_ns(), rank, source, number))

    scene.run({rank: lambda rank=rank: (sender if rank < 3 else taker)(rank) for rank in range(6)})  # type: ignore[misc]
    return seen


def test_the_same_again_is_the_same_again() -> None:
    runs = [chatter(seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert sorted(number for *_, number in runs[0]) == list(range(200))


def test_a_part_does_not_overtake_the_part_before_it() -> None:
    """Rank 0 posts, as rank 2 says, after the first part is sent, and before it arrives; rank 1 sends another meanwhile."""
    scene, sizes = Exchange(3), list[int]()
    w = scene.w

    def sender() -> None:
        w[1].work(50)
        first = w[1].start(0, Tag.PART, (10,), SizedVector(10))
        w[1].take(ANYTHING)
        assert w[1].clock.now_ns() < first.arrival
        for transfer in (first, w[1].start(0, Tag.PART, (20,), SizedVector(20))):
            w[1].finish(transfer)

    def receiver() -> None:
        w[0].take(ANYTHING)
        for _ in range(2):
            posted = w[0].post(1, Tag.PART, SizedVector(20))
            sizes.append(w[0].header(posted)[0])
            w[0].finish(posted)

    def caller() -> None:
        for transfer in [w[2].start(rank, Tag.PULL, PULL) for rank in (0, 1)]:
            w[2].finish(transfer)

    scene.run({0: receiver, 1: sender, 2: caller})
    assert sizes == [10, 20]
