"""Messages in virtual time: exact nanoseconds of small exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpisgd.comm.messages import Tag
from tests.virtual.scene import ANSWER, ANYTHING, PULL, PUSH, Exchange, body

# --------------------------------------------------------------------------------------------- until a time, interruptions


@pytest.mark.parametrize(
    ("sent_ns", "until_ns", "busy_ns", "found", "over_ns"),
    [
        (0, 500, 0, True, 120),  # sent at 10, there at 110, taken by 120
        (1000, 500, 0, False, 500),  # the time is over first
        (390, 500, 0, True, 510),  # there at that very nanosecond
        (391, 500, 0, False, 500),  # one later
        (0, 500, 800, True, 810),  # what came while the rank was busy is taken, though the time is over
        (5000, 500, 800, False, 800),
    ],
)
def test_a_message_is_waited_for_until_a_time(sent_ns: int, until_ns: int, busy_ns: int, found: bool, over_ns: int) -> None:
    scene = Exchange(2)
    taken: list[Any] = []

    def waits() -> None:
        scene.w[1].work(busy_ns)
        taken.append(scene.w[1].take(ANYTHING, until_ns))
        scene.note(1, "over")
        if taken[0] is None:
            scene.w[1].take(ANYTHING)

    scene.run({0: scene.sends(0, 1, Tag.PULL, PULL, after_ns=sent_ns), 1: waits})
    assert (taken[0] is not None) is found
    assert scene.times["over"] == over_ns


def test_a_time_that_is_over_disturbs_no_later_wait() -> None:
    """The alarm of a wait that ended early rings while the rank waits for something else."""
    scene = Exchange(2)

    def sends_twice() -> None:
        scene.w[0].finish(scene.w[0].start(1, Tag.PULL, PULL))
        scene.w[0].work(2000)
        scene.w[0].finish(scene.w[0].start(1, Tag.PULL, PULL))

    def waits() -> None:
        assert scene.w[1].take(ANYTHING, 1000) is not None
        scene.w[1].take(ANYTHING)
        scene.note(1, "took")

    scene.run({0: sends_twice, 1: waits})
    assert scene.times["took"] == 120 + 2000 + 120


def test_a_posted_receive_is_there_once_its_header_has_come() -> None:
    scene = Exchange(2)
    seen: list[bool] = []

    def looks() -> None:
        posted = scene.w[1].post(0, Tag.NOTICE)
        for _ in range(4):
            seen.append(posted.arrived())
            scene.w[1].work(50)
        scene.w[1].finish(posted)

    scene.run({0: scene.sends(0, 1, Tag.NOTICE, (0, 0)), 1: looks})
    assert seen == [False, False, False, True], "at 0, 50, 100, 150: it came at 110"


def test_work_is_interrupted_where_somebody_looks_up() -> None:
    """1600 ns of work in 16 parts: the message that comes at 110 is seen at 200."""
    scene = Exchange(2)

    class Enough(Exception):
        pass

    def works() -> None:
        posted = scene.w[1].post(0, Tag.NOTICE)

        def check() -> None:
            if posted.arrived():
                raise Enough

        scene.w[1].clock.interrupt_by(check)
        with pytest.raises(Enough):
            scene.w[1].work(1600)
        scene.note(1, "gave up")
        scene.w[1].clock.interrupt_by(None)
        scene.w[1].work(1600)
        scene.note(1, "done")

    scene.run({0: scene.sends(0, 1, Tag.NOTICE, (0, 0)), 1: works})
    assert (scene.times["gave up"], scene.times["done"]) == (200, 1800)


# ------------------------------------------------------------------------------------------------------ headers, blocking


def test_a_header_is_taken_when_it_is_there() -> None:
    """10 to send, 100 on the way, 10 to receive; the sender is held until then, as MPI_Ssend holds it."""
    scene = Exchange(2)
    scene.run({0: scene.sends(0, 1, Tag.PULL, PULL), 1: scene.takes(1)})
    assert scene.times == {"0 begun": 10, "1 took": 120, "1 has": 120, "0 done": 120}


def test_a_send_blocks_until_the_receiver_takes_it() -> None:
    scene = Exchange(2)
    scene.run({0: scene.sends(0, 1, Tag.PULL, PULL), 1: scene.takes(1, after_ns=5000)})
    assert scene.times == {"0 begun": 10, "1 took": 5010, "1 has": 5010, "0 done": 5010}


@pytest.mark.parametrize(("posted_ns", "over_ns"), [(0, 110), (110, 110), (5000, 5000)])
def test_a_send_blocks_until_a_receive_is_posted(posted_ns: int, over_ns: int) -> None:
    """Posted is enough: that the receiver looks at it much later holds nobody."""
    scene = Exchange(2)
    looks_ns = posted_ns + 900
    scene.run(
        {
            0: scene.sends(0, 1, Tag.PULL, PULL),
            1: scene.posts(1, 0, Tag.PULL, after_ns=posted_ns, looks_ns=looks_ns),
        }
    )
    assert scene.times == {"0 begun": 10, "0 done": over_ns, "1 began": looks_ns, "1 has": looks_ns}


def test_a_question_and_its_answer() -> None:
    """Asked at 10, taken at 120, answered at 130: there at 230, over at 1230; the question itself holds nobody."""
    scene = Exchange(2)

    def learner() -> None:
        asked = scene.w[1].ask(0, Tag.PULL, PULL, Tag.ANSWER, (body(),))
        scene.note(1, "asked")
        assert scene.w[1].header(asked) == ANSWER
        scene.note(1, "began")
        scene.w[1].finish(asked)
        scene.note(1, "has")

    def shard() -> None:
        assert scene.w[0].take(ANYTHING) == (1, Tag.PULL, PULL)
        scene.w[0].finish(scene.w[0].start(1, Tag.ANSWER, ANSWER, body()))
        scene.note(0, "answered")

    scene.run({0: shard, 1: learner})
    assert scene.times == {"asked": 10, "began": 230, "has": 1230, "answered": 1230}


def test_who_finishes_late_is_not_held() -> None:
    scene = Exchange(2)

    def sender() -> None:
        sending = scene.w[0].start(1, Tag.PULL, PULL)
        scene.w[0].work(1000)
        scene.w[0].finish(sending)
        scene.note(0, "0 done")

    scene.run({0: sender, 1: scene.takes(1)})
    assert scene.times["0 done"] == 1010


def test_sleep_and_work_pass_on_one_rank_alone() -> None:
    scene = Exchange(2)

    def main() -> None:
        scene.w[0].clock.sleep(2.5e-6)
        scene.w[0].work(7)
        scene.note(0, "0")

    scene.run({0: main, 1: lambda: scene.note(1, "1")})
    assert scene.times == {"0": 2507, "1": 0}


# ----------------------------------------------------------------------------------------------------------------- bodies


def test_a_body_crosses_the_link_once_the_header_is_taken() -> None:
    scene = Exchange(2)
    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: scene.takes(1, body())})
    assert scene.times == {"0 begun": 10, "1 took": 120, "1 has": 1120, "0 done": 1120}


def test_a_body_begins_later_where_the_receiver_takes_it_later() -> None:
    scene = Exchange(2)

    def shard() -> None:
        scene.w[1].take(ANYTHING)
        scene.w[1].work(380)
        scene.w[1].take_body(body())
        scene.note(1, "1 has")

    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: shard})
    assert scene.times == {"0 begun": 10, "1 has": 1500, "0 done": 1500}


@pytest.mark.parametrize(("posted_ns", "begun_ns"), [(0, 110), (5000, 5000)])
def test_a_body_with_a_posted_receive(posted_ns: int, begun_ns: int) -> None:
    scene = Exchange(2)
    scene.run({0: scene.sends(0, 1, Tag.ANSWER, ANSWER, body()), 1: scene.posts(1, 0, Tag.ANSWER, body(), after_ns=posted_ns)})
    assert scene.times == {"0 begun": 10, "1 began": begun_ns, "0 done": begun_ns + 1000, "1 has": begun_ns + 1000}


def test_a_posted_receive_may_be_finished_without_a_look_at_its_header() -> None:
    """Rank 1 runs ahead of the others: its message meets its receive before it is known when the links are free."""
    scene = Exchange(4)

    def receives() -> None:
        scene.w[0].finish(scene.w[0].post(1, Tag.ANSWER, body()))
        scene.note(0, "has")

    sends = {1: scene.sends(1, 0, Tag.ANSWER, ANSWER, body(), after_ns=1000), 2: scene.sends(2, 3, Tag.PULL, PULL)}
    scene.run({0: receives, **sends, 3: scene.takes(3)})
    assert scene.times["has"] == 2110


def test_two_bodies_are_one_transfer() -> None:
    scene = Exchange(2)
    scene.run(
        {
            0: scene.sends(0, 1, Tag.SNAPSHOT_ANSWER, (0,) * 6, body(), body()),
            1: scene.posts(1, 0, Tag.SNAPSHOT_ANSWER, body(), body()),
        }
    )
    assert (scene.times["1 began"], scene.times["1 has"], scene.times["0 done"]) == (110, 2110, 2110)


def test_what_arrives_is_what_was_sent() -> None:
    scene, got = Exchange(2), [np.zeros(5, np.float32), np.zeros(3, np.float32)]
    sent = [np.arange(5, dtype=np.float32), -np.ones(2, np.float32)]
    fields = (1, 2, 3, 4, 5, 6)

    def receiver() -> None:
        posted = scene.w[1].post(0, Tag.SNAPSHOT_ANSWER, *got)
        assert scene.w[1].header(posted) == fields
        scene.w[1].finish(posted)

    scene.run({0: scene.sends(0, 1, Tag.SNAPSHOT_ANSWER, fields, *sent), 1: receiver})
    assert [vector.tolist() for vector in got] == [[0, 1, 2, 3, 4], [-1, -1, 0]]


# ----------------------------------------------------------------------------------------------------------------- contention


def test_two_answers_into_one_rank_take_twice_as_long() -> None:
    """The second waits for the link, not for its receive."""
    scene = Exchange(3)

    def learner() -> None:
        posted = [scene.w[2].post(source, Tag.ANSWER, body()) for source in (0, 1)]
        for source, receiving in enumerate(posted):
            scene.w[2].header(receiving)
            scene.note(2, f"{source} began")
            scene.w[2].finish(receiving)
            scene.note(2, f"{source} has")

    senders = {rank: scene.sends(rank, 2, Tag.ANSWER, ANSWER, body()) for rank in (0, 1)}
    scene.run({**senders, 2: learner})
    assert scene.times["0 done"] == 1110
    assert scene.times["1 done"] == 2110
    assert [scene.times[name] for name in ("0 began", "0 has", "1 began", "1 has")] == [110, 1110, 1110, 2110]


def test_two_pushes_into_one_shard_take_twice_as_long() -> None:
    """It takes one after the other: 10 for each header, 1000 for each body."""
    scene = Exchange(3)
    senders = {rank: scene.sends(rank, 2, Tag.PUSH, PUSH, body()) for rank in (0, 1)}
    scene.run({**senders, 2: scene.takes(2, body(), count=2)})
    assert (scene.times["0 done"], scene.times["1 done"]) == (1120, 2130)


def pushes_to_two_shards(nodes: list[int]) -> tuple[int, int]:
    """When learners 2 and 3 have pushed, each to a shard of its own, 0 and 1."""
    scene = Exchange(4, nodes=nodes)
    learners = {rank: scene.sends(rank, rank - 2, Tag.PUSH, PUSH, body()) for rank in (2, 3)}
    scene.run({**learners, 0: scene.takes(0, body()), 1: scene.takes(1, body())})
    return scene.times["2 done"], scene.times["3 done"]


def test_two_shards_of_one_node_share_the_nodes_link() -> None:
    assert pushes_to_two_shards([0, 1, 2, 3]) == (1120, 1120)
    assert pushes_to_two_shards([0, 0, 1, 2]) == (1120, 2120)
    assert pushes_to_two_shards([0, 1, 2, 2]) == (1120, 2120), "so do two learners of one node"
    assert pushes_to_two_shards([0, 1, 0, 1]) == (1120, 1120), "within a node its link is not used"


def test_full_duplex() -> None:
    """Both send to each other: done when a single message would be."""
    scene = Exchange(2)

    def both(rank: int) -> Callable[[], None]:
        def main() -> None:
            posted = scene.w[rank].post(1 - rank, Tag.ANSWER, body())
            sending = scene.w[rank].start(1 - rank, Tag.ANSWER, ANSWER, body())
            scene.w[rank].finish(posted)
            scene.w[rank].finish(sending)
            scene.note(rank, f"{rank}")

        return main

    scene.run({0: both(0), 1: both(1)})
    assert scene.times == {"0": 1110, "1": 1110}


def test_one_weights_vector_to_three_learners_leaves_one_after_the_other() -> None:
    scene = Exchange(4)

    def shard() -> None:
        for sending in [scene.w[0].start(rank, Tag.ANSWER, ANSWER, body()) for rank in (1, 2, 3)]:
            scene.w[0].finish(sending)
        scene.note(0, "0 done")

    scene.run({0: shard, **{rank: scene.posts(rank, 0, Tag.ANSWER, body()) for rank in (1, 2, 3)}})
    assert [scene.times[f"{rank} has"] for rank in (1, 2, 3)] == [1110, 2110, 3110]
    assert scene.times["0 done"] == 3110
