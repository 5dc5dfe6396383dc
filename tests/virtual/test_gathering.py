"""A shard that receives the gradients of all learners at the same time (`exchange/travel/gathering.py`): order, memory, bits.

What it gains behind a slow link is in `test_slow_link.py`; that laws hold whatever the schedule is in `test_laws.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.comm.messages import LAYOUTS, Goodbye, Message, Pull, Push, Refused, Tag
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.travel import gathering
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import body
from mpisgd.vectors.body import Body, Pool
from mpisgd.vectors.memory import SizedVector
from tests.effort import spread
from tests.virtual.jobs import TENSORS, simulated
from tests.virtual.laws import Laws
from tests.virtual.scene import Exchange, packed
from tests.virtual.test_streamed import weights

SLICE = SizedVector(250)
"""1,000 bytes, so 1,000 ns on the way."""
SOFTSYNC = {"name": "softsync", "n": 2}
SLOW = {"bandwidth": 1e5, "node_bandwidth": 1e5, "slow_links": {"3": 10.0, "4": 25.0}}
"""A gradient of TENSORS takes about as long as a mini-batch, and longer behind two links."""


class Sizes(Pool):
    """Bodies of SLICE, so many at a time; whoever hears of one gives it back."""

    def __init__(self, most: int = 9) -> None:
        super().__init__(SLICE)
        self.left = most
        self.fewest = most

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        return self.left > 0

    def take(self) -> Body:
        self.left -= 1
        self.fewest = min(self.fewest, self.left)
        return Lent(self)


class Lent(Body):
    __slots__ = ("_pool",)

    def __init__(self, pool: Sizes) -> None:
        super().__init__(SLICE)
        self._pool = pool

    def release(self, stop: int | None = None) -> None:
        self._pool.left += 1

    def lose(self) -> None:
        self.release()


def told(learner_id: int, seq: int = 0) -> tuple[Any, ...]:
    fields = dict.fromkeys(LAYOUTS[Tag.PUSH].fields, 0) | {"learner_id": learner_id, "seq": seq, "nbytes": SLICE.nbytes}
    return tuple((fields | {"gradients": 1, "samples": 1}).values())


def served(mains: dict[int, Callable[[Exchange], None]], count: int, bodies: Sizes, until_s: float = 1.0) -> list[tuple[int, Any]]:
    """What a shard, rank 0, with two learners hears, and at which nanosecond."""
    scene, heard = Exchange(3), list[tuple[int, Any]]()

    def shard() -> None:
        channel = ShardChannel(scene.w[0], packed(), 0, gathered=True)
        for _ in range(count):
            message = channel.receive(bodies, until_s=until_s)
            if isinstance(message, Push):
                message.body.release()
            heard.append((scene.w[0].now, message))

    scene.run({0: shard, **{rank: lambda main=main: main(scene) for rank, main in mains.items()}})  # type: ignore[misc]
    return heard


def pushes(rank: int, *after: tuple[Tag, tuple[int, ...]], after_ns: int = 0, factor: int = 1) -> Callable[[Exchange], None]:
    """A learner that pushes, and says the rest without waiting until its gradient has left."""

    def main(scene: Exchange) -> None:
        scene.w[rank].work(after_ns)
        begun = [scene.w[rank].start(0, Tag.PUSH, told(rank - 1), SizedVector(factor * SLICE.size))]
        begun += [scene.w[rank].start(0, tag, fields) for tag, fields in after]
        for each in begun:
            scene.w[rank].finish(each)

    return main


def kinds(heard: list[tuple[int, Message]]) -> list[tuple[str, int]]:
    return [(type(message).__name__, getattr(message, "learner_id", -1)) for _, message in heard]


def test_a_gradient_counts_when_it_is_whole_and_others_are_heard_meanwhile() -> None:
    heard = served(
        {1: pushes(1), 2: lambda scene: scene.w[2].finish(scene.w[2].start(0, Tag.GOODBYE, (1, 0, 0)))}, 2, bodies := Sizes()
    )
    assert kinds(heard) == [("Goodbye", 1), ("Push", 0)]
    push = heard[1][1]
    assert push.arrival_ns == heard[1][0] >= SLICE.nbytes, "its bytes had to cross"
    assert (bodies.left, bodies.fewest) == (9, 8)


def test_what_a_learner_says_after_its_push_is_heard_after_it() -> None:
    heard = served({1: pushes(1, (Tag.PULL, (0, 1)), (Tag.GOODBYE, (0, 1, 0))), 2: pushes(2)}, 4, Sizes())
    assert [each for each in kinds(heard) if each[1] == 0] == [("Push", 0), ("Pull", 0), ("Goodbye", 0)]


def test_pulls_of_others_are_answered_while_chunks_are_made() -> None:
    scene, heard = Exchange(3), list[Any]()

    def shard() -> None:
        channel, bodies = ShardChannel(scene.w[0], packed(), 0, gathered=True), Sizes()
        assert channel.receive(bodies, until_s=500e-9) is None, "the gradient is on its way"
        scene.w[0].work(400)
        heard.extend((channel.receive_pull(), channel.receive_pull()))
        heard.extend(channel.receive(bodies) for _ in range(2))

    def pulls() -> None:
        scene.w[2].work(600)
        scene.w[2].start(0, Tag.PULL, (1, 0))

    scene.run({0: shard, 1: lambda: pushes(1, (Tag.PULL, (0, 1)))(scene), 2: pulls})
    assert isinstance(heard[0], Pull) and heard[0].learner_id == 1
    assert heard[1] is None, "that of a learner whose push is coming must wait"
    assert [type(each) for each in heard[2:]] == [Push, Pull]


def test_none_is_returned_in_time() -> None:
    heard = served({1: pushes(1)}, 2, Sizes(), until_s=400e-9)
    assert [type(message) for _, message in heard] == [type(None), type(None)]
    assert heard[0][0] == 400, "before the gradient was whole"


def test_without_memory_a_gradient_is_taken_at_once() -> None:
    """The second learner's comes while there is no room: as ever, nobody else is heard until it is there."""
    heard = served({1: pushes(1), 2: pushes(2, after_ns=50)}, 2, bodies := Sizes(1))
    assert sorted(kinds(heard)) == [("Push", 0), ("Push", 1)]
    assert (bodies.left, bodies.fewest) == (1, -1)


def test_a_gradient_that_never_comes_is_refused_and_books_balance() -> None:
    scene = Exchange(2)
    channel, bodies = ShardChannel(scene.w[0], packed(learners=1), 0, gathered=True), Sizes()

    class Never:
        def is_whole(self) -> bool:
            return True

        def check(self) -> None:
            raise gathering.PeerError("rank 1 sent a header without GRADIENT: nothing came for 30 s", 1)

    scene.w[0].post = lambda *arguments: Never()  # type: ignore[method-assign]
    taken = iter([(1, Tag.PUSH, told(0)), None, (1, Tag.GOODBYE, (0, 1, 0))])
    scene.w[0].take = lambda *arguments: next(taken)  # type: ignore[method-assign]
    refused, goodbye = channel.receive(bodies), channel.receive(bodies)
    assert isinstance(refused, Refused) and refused.push and refused.rank == 1
    assert isinstance(goodbye, Goodbye)
    assert bodies.left == 9


# ----------------------------------------------------------------------------------------------------------- answers


class Answer:
    def __init__(self) -> None:
        self.left = False

    def has_left(self) -> bool:
        return self.left


def test_weights_may_change_while_a_few_answers_leave() -> None:
    """More than that are waited for, the oldest first."""
    scene = Exchange(2)
    channel, waited = ShardChannel(scene.w[0], packed(learners=1), 0, gathered=True), list[Answer]()
    begun = [Answer() for _ in range(gathering.COPIES + 2)]
    scene.w[0].start = lambda *arguments: begun[len(given)]  # type: ignore[method-assign]
    scene.w[0].finish = lambda answer: waited.append(answer) or True  # type: ignore[method-assign, func-returns-value]
    given = list[Answer]()
    assert channel.finish_answers(), "none is under way"
    for number in range(gathering.COPIES + 1):
        channel.start_answers([0], np.zeros(1, np.float32), 0, {})
        given.append(begun[number])
        assert not channel.finish_answers()
    assert waited == begun[:1]
    begun[1].left = True
    channel.start_answers([0], np.zeros(1, np.float32), 0, {})
    assert not channel.finish_answers()
    assert waited == begun[:1], "one had left by itself"
    channel.finish_answers(last=True)
    assert waited == [begun[0], *begun[2:]]


# -------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"protocol": SOFTSYNC, "push_format": "topk", "topk_share": 0.1, "pull_format": "bfloat16"},
            {"protocol": SOFTSYNC, "ahead": 1, "push_format": "bfloat16", "pull_format": "bfloat16"},
            {"protocol": "async", "compensation": 0.04, "compensation_memory": 0.9},
            {"protocol": {"name": "ssp", "slack": 1}, "per_layer": True},
            {"protocol": {"name": "backup", "b": 2, "abort": True}, "pull_format": "bfloat16"},
            {"protocol": "hardsync", "optimizer": "adam", "averaging": 0.9},
            {"protocol": "downpour"},
            {"protocol": {"name": "backup", "b": 1}, "sampling": "dealt"},
        ],
        4,
    ),
)
def test_replay_proves_it_behind_slow_links(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights change while answers leave; with memory for two gradients, the third is waited for."""
    monkeypatch.setattr(body, "PARKED_NBYTES", 700)
    renewed = list[int]()
    renew = SliceUpdate.renew_weights
    monkeypatch.setattr(SliceUpdate, "renew_weights", lambda self: (renewed.append(1), renew(self))[1])
    run = simulated(tmp_path / "run", TENSORS, way="gathered", shards=2, network=SLOW, **changes)
    if "sampling" not in changes:  # whose end is another's
        Laws(run).hold()
    proof = replay.replay(run.path)
    assert proof.reason == ""
    assert {each.elements for each in proof.differences} == {0}
    assert renewed or "pull_format" in changes or changes["protocol"] == "hardsync"


def test_hardsync_has_the_same_bits(tmp_path: Path) -> None:
    in_turn, gathered = (
        simulated(tmp_path / way, TENSORS, way=way, protocol="hardsync", network=SLOW) for way in ("whole", "gathered")
    )
    np.testing.assert_array_equal(weights(gathered), weights(in_turn))
