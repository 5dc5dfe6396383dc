"""Messages that share links in turns, in virtual time: exact nanoseconds, and jobs whose learners slow each other down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import DeadlockError
from mpisgd.comm.messages import Tag
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.records.log import schema
from mpisgd.replay import replay
from mpisgd.vectors.memory import SizedVector
from tests.virtual.jobs import SIZES, TENSORS, merged, simulated
from tests.virtual.scene import ANYTHING, EXACT, PUSH, Exchange, body

TURNS = dataclasses.replace(EXACT, turn_nbytes=100)


def both(first_ns: int, second_ns: int, network: NetworkOptions) -> tuple[int, int]:
    """When two messages into one rank have left, which are sent after so many nanoseconds: 1000 bytes, at 1 byte/ns."""
    scene = Exchange(3, network=network)

    def receives() -> None:
        posted = [scene.w[2].post(source, Tag.ANSWER, body()) for source in (0, 1)]
        for each in posted:
            scene.w[2].finish(each)

    def sends(rank: int, after_ns: int) -> Callable[[], None]:
        return scene.sends(rank, 2, Tag.ANSWER, (0,) * 5, body(), after_ns=after_ns)

    scene.run({0: sends(0, first_ns), 1: sends(1, second_ns), 2: receives})
    return scene.times["0 done"], scene.times["1 done"]


def test_two_that_begin_at_once_share_a_link() -> None:
    """Header and latency take 110 ns; then 2000 bytes pass, in turns of 100."""
    assert both(0, 0, EXACT) == (1110, 2110)
    assert both(0, 0, TURNS) == (2010, 2110)


def test_one_that_begins_later_slows_the_other_down() -> None:
    """500 bytes of the first pass alone, its other half with as many of the second."""
    assert both(0, 500, EXACT) == (1110, 2110)
    assert both(0, 500, TURNS) == (1510, 2110), "the turn that it is in when the other comes is its own"


def test_what_is_alone_takes_as_long_as_without_turns() -> None:
    assert both(0, 3000, TURNS) == both(0, 3000, EXACT) == (1110, 4110)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 5000))
def test_the_link_is_never_idle_for_it(first_ns: int, second_ns: int, turn_nbytes: int) -> None:
    """All that begins ends when it would without turns: only who is first may change."""
    turned = both(first_ns, second_ns, dataclasses.replace(EXACT, turn_nbytes=turn_nbytes))
    assert max(turned) == max(both(first_ns, second_ns, EXACT))


def test_messages_of_one_sender_cross_one_after_the_other() -> None:
    """As over one connection: they share the link with other senders' alone."""
    scene = Exchange(2, network=TURNS)

    def sends() -> None:
        sending = [scene.w[0].start(1, Tag.ANSWER, (0,) * 5, body()) for _ in range(2)]
        for number, each in enumerate(sending):
            scene.w[0].finish(each)
            scene.note(0, f"done {number}")

    def receives() -> None:
        posted = [scene.w[1].post(0, Tag.ANSWER, body()) for _ in range(2)]
        for each in posted:
            scene.w[1].finish(each)

    scene.run({0: sends, 1: receives})
    assert (scene.times["done 0"], scene.times["done 1"]) == (1110, 2110)


def test_a_body_that_was_taken_is_waited_for() -> None:
    scene = Exchange(2, network=TURNS)
    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: scene.takes(1, body())})
    assert scene.times["1 took"] == 120
    assert scene.times["1 has"] == scene.times["0 done"] == 1120


@pytest.mark.parametrize("turn_nbytes", [0, 100])
def test_who_takes_what_comes_is_told_of_a_body_that_is_whole(turn_nbytes: int) -> None:
    """Two bodies are under way; a message comes first, then nothing but that the first body, and the second, are whole."""
    scene = Exchange(4, network=dataclasses.replace(EXACT, turn_nbytes=turn_nbytes))
    seen: list[tuple[Any, list[bool], int]] = []

    def receives() -> None:
        wire, coming = scene.w[3], []
        for _ in range(2):
            wire.take(ANYTHING)
            coming.append(wire.post(0, Tag.GRADIENT, body()))
        while left := [each for each in coming if not each.checked]:
            taken = wire.take(ANYTHING, coming=left)
            seen.append((taken and taken[0], [each.is_whole() for each in left], wire.now_ns()))
            for each in left:
                if each.is_whole():
                    each.check()

    mains = {rank: scene.sends(rank, 3, Tag.PUSH, PUSH, body()) for rank in (0, 1)}
    scene.run({**mains, 2: scene.sends(2, 3, Tag.PULL, (0, 0), after_ns=500), 3: receives})
    ends_ns = [(1120, 2120), (2020, 2120)][turn_nbytes > 0]
    assert seen == [(2, [False, False], 620), (None, [True, False], ends_ns[0]), (None, [True], ends_ns[1])]


@pytest.mark.parametrize("turn_nbytes", [0, 100])
def test_a_body_that_was_whole_before_is_found_at_once(turn_nbytes: int) -> None:
    """It became so while the rank was busy, of which its clock alone knows."""
    scene = Exchange(2, network=dataclasses.replace(EXACT, turn_nbytes=turn_nbytes))

    def receives() -> None:
        scene.w[1].take(ANYTHING)
        coming = scene.w[1].post(0, Tag.GRADIENT, body())
        scene.w[1].work(3000)
        assert scene.w[1].take(ANYTHING, coming=[coming]) is None
        scene.note(1, "over")

    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: receives})
    assert (scene.times["0 done"], scene.times["over"]) == (1120, 3120)


def test_who_does_not_look_for_bodies_waits_until_its_time() -> None:
    scene = Exchange(2, network=TURNS)

    def receives() -> None:
        scene.w[1].take(ANYTHING)
        coming = scene.w[1].post(0, Tag.GRADIENT, body())
        assert scene.w[1].take(ANYTHING, 5000) is None
        scene.note(1, "over")
        assert coming.is_whole()

    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: receives})
    assert (scene.times["0 done"], scene.times["over"]) == (1120, 5000)


def test_a_body_of_nothing_is_there_at_once() -> None:
    scene = Exchange(2, network=TURNS)
    scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, SizedVector(0)), 1: scene.takes(1, SizedVector(0))})
    assert scene.times["1 has"] == scene.times["1 took"] == 120


def test_who_waits_for_ever_is_told_with_turns() -> None:
    scene = Exchange(3, network=TURNS)
    with pytest.raises(DeadlockError, match=r"rank 2 .* waits for ANSWER of rank 1"):
        scene.run({0: scene.sends(0, 1, Tag.PUSH, PUSH, body()), 1: scene.takes(1, body()), 2: scene.posts(2, 1, Tag.ANSWER)})


#: Two nodes of a learner and a shard, 44 MB over links of 1 Gbit/s, as the bench of several nodes has them (`results/README.md`).
NODES = {
    "virtual": {"learners": 2, "parameters": 11_000_000, "ranks_per_node": 2, "train_samples": 480},
    "shards": 2,
    "compute": {"name": "normal", "mean_s": 0.024, "deviation_s": 0.004},
    "network": {"latency_s": 1e-4, "overhead_s": 2e-5, "bandwidth": 4e9, "node_bandwidth": 1.2e8, "local_bandwidth": 4e9},
}


def round_s(tmp_path: Path, protocol: str, turn_nbytes: int) -> float:
    changes = merged(NODES, {"network": {"turn_nbytes": turn_nbytes}, "protocol": protocol})
    run = simulated(tmp_path / f"{protocol} {turn_nbytes}", SIZES, **changes)
    pushes = run.pushes[run.pushes["shard"] == 0]
    return float(pushes["arrival_s"][-1] - pushes["arrival_s"][19]) * 2 / (len(pushes) - 20)


def test_learners_that_share_links_need_longer_than_ones_that_wait_in_line(tmp_path: Path) -> None:
    """Whole vectors to and fro, of learners that are out of step: 0.71 to 0.73 s were measured on such nodes."""
    assert 0.55 < round_s(tmp_path, "async", 0) < 0.61
    assert 0.70 < round_s(tmp_path, "async", 1_000_000) < 0.78


@pytest.mark.parametrize(("turn_nbytes", "least", "most"), [(0, 0.40, 0.44), (1_000_000, 0.65, 0.75)])
def test_learners_that_share_links_fall_out_of_step(turn_nbytes: int, least: float, most: float, tmp_path: Path) -> None:
    """A learner of hardsync pauses once. In line, the next rounds are as before; sharing, they use a link's directions in turn. On
    such nodes 0.48 to 0.66 s were measured, 0.43 to 0.77 within one run."""
    pause = {"pause_learner": 0, "pause_every": 25, "pause_s": 0.3}
    changes = merged(NODES, {"network": {"turn_nbytes": turn_nbytes}, "protocol": "hardsync", "way": "whole", "straggler": pause})
    run = simulated(tmp_path / "run", SIZES, **changes)
    updates = run.updates[run.updates["shard"] == 0]["time_s"]
    rounds = updates[1:] - updates[:-1]
    paused = int(rounds[:30].argmax())
    assert 20 < paused < 27
    assert 0.40 < rounds[:20].mean() < 0.44
    assert least < rounds[paused + 1 : paused + 6].mean() < most


def test_runs_whose_cores_did_not_copy_are_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as then:
        then.setattr(schema, "RULES", 4)
        run = simulated(tmp_path / "run", TENSORS, shards=2, protocol="async", network={"core_bandwidth": 1e6})
    proof = replay(run.path)
    assert proof.holds
    assert "copied nothing within their nodes" in proof.not_simulated
