"""Spare ranks take the place of learners that die, on all shards alike; laws hold, nobody waits for ever, replay proves it.

The storms (`test_storms.py`) draw spares, too.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mpisgd.comm.messages import Tag
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.tolerant_channel import SpareChannel
from mpisgd.job.roles.sgd import BuiltLearner
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.effort import spread, thinned
from tests.virtual.storm import aftermath, draw, package
from tests.virtual.storm.draw import LONG_S, PATIENCE_S, WAYS, Draw, Fault

QUICK = [("hardsync", 3), ("async", 1), ("versioned", 3)]
"""Of the ways and shards of these tests, such as `make test` has."""


def seldom(often: list[Any], cases: list[Any]) -> list[Any]:
    """Parameters, of which `make test` has those named, and CI a third of the others."""
    others = (each for each in cases if each not in often)
    return [*often, *(pytest.param(*each, marks=pytest.mark.slow) for each in thinned(others, 9))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def drawn(way: str, shards: int, *faults: Fault, learners: int = 3, spares: int = 1, **other: object) -> Draw:
    fields = {"evaluator": False, "tolerant": True, "seed": 2246, "every_updates": 3, "latency_ns": 50_000, "eager_nbytes": 0}
    fields |= {"reorders": True, "flush_rows": 4, "attempts": (faults,), **other}
    return Draw(way=way, shards=shards, learners=learners, spares=spares, **fields)  # type: ignore[arg-type]


def weathered(drawn_: Draw, path: Path) -> Run:
    """The run that is DONE in one attempt, in whose end no rank was in want of anything, and that replay has proved."""
    seen = aftermath.weather(drawn_, path)
    assert not seen.failures, f"{seen.failures[0]}\n{drawn_!r}"
    assert seen.totals["attempts"] == 1, seen.ends
    return Run(path / "run-0")


def told(run: Run, kind: Event, shard: int) -> list[tuple[int, float]]:
    events = run.events[(run.events["kind"] == kind) & (run.events["shard"] == shard)]
    return [(int(learner_id), float(value)) for learner_id, value in events[["learner_id", "value"]].tolist()]


@pytest.mark.parametrize(("way", "shards"), seldom(QUICK, [(way, shards) for way in WAYS for shards in (1, 3)]))
def test_a_spare_takes_the_place_of_a_learner_that_dies(way: str, shards: int, tmp_path: Path) -> None:
    """It begins with the mini-batch after the last that any shard has had, and all learners leave in the end."""
    learner, spare = shards + 1, shards + 3
    run = weathered(drawn(way, shards, Fault("kill", learner, at_s=0.03)), tmp_path)
    for shard in range(shards):
        assert [learner_id for learner_id, _ in told(run, Event.LOST, shard)] == [1]
        assert told(run, Event.SUCCEEDED, shard) == [(1, spare)]
        assert {learner_id for learner_id, _ in told(run, Event.GOODBYE, shard)} == {0, 1, 2}
    since_s = run.events["time_s"][run.events["kind"] == Event.SUCCEEDED].max()
    mine = run.pushes[run.pushes["learner_id"] == 1]
    late = mine["arrival_s"] > since_s
    assert late.any()
    assert mine["seq"][late].min() == mine["seq"][~late].max(initial=-1) + 1


@pytest.mark.parametrize(("way", "shard"), spread([("hardsync", 0), ("hardsync", 1), ("async", 0), ("async", 1)], 3, unpack=True))
def test_a_gradient_that_came_to_one_shard_alone_is_lost_on_the_other(way: str, shard: int, tmp_path: Path) -> None:
    """The spare goes on after it on both, and all is accounted for."""
    begin = LearnerChannel._send

    def dies(channel: Any, report: Any) -> list[Any]:
        if channel._wire.rank == 3 and report.seq == 2:
            gradient = channel._gradients[shard]
            told = channel._told(shard, report)
            channel._wire.finish(channel._wire.start(shard, Tag.PUSH, told, gradient))
            machine = package._machines[-1]
            process = machine.processes[3]
            process.at_call[process.calls + 1] = functools.partial(machine.kill, 3)
        return begin(channel, report)

    with mock.patch.object(LearnerChannel, "_send", dies):
        run = weathered(drawn(way, 2), tmp_path)
    mine = run.pushes[run.pushes["learner_id"] == 1]
    seqs = [mine["seq"][mine["shard"] == each].tolist() for each in range(2)]
    assert seqs[shard][:4] == [0, 1, 2, 3]
    assert seqs[1 - shard][:3] == [0, 1, 3]


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_die_and_one_spare_is_left(shards: int, tmp_path: Path) -> None:
    faults = Fault("kill", shards, at_s=0.05), Fault("kill", shards + 2, at_s=0.07)
    run = weathered(drawn("hardsync", shards, *faults), tmp_path)
    for shard in range(shards):
        assert told(run, Event.SUCCEEDED, shard) == [(0, shards + 3)]
        assert [learner_id for learner_id, _ in told(run, Event.LOST, shard)] == [0, 2]


@pytest.mark.parametrize("evaluator", [pytest.param(False, marks=pytest.mark.slow), True])
def test_spares_take_all_places_when_all_learners_die(evaluator: bool, tmp_path: Path) -> None:
    faults = Fault("kill", 2, at_s=0.05), Fault("kill", 3, at_s=0.05)
    run = weathered(drawn("async", 2, *faults, learners=2, spares=2, evaluator=evaluator), tmp_path)
    for shard in range(2):
        assert {learner_id for learner_id, _ in told(run, Event.SUCCEEDED, shard)} == {0, 1}


def test_a_spare_that_dies_idle_is_no_loss(tmp_path: Path) -> None:
    run = weathered(drawn("softsync", 2, Fault("kill", 5, at_s=0.03), Fault("kill", 3, at_s=0.06)), tmp_path)
    assert not told(run, Event.SUCCEEDED, 0)
    assert [learner_id for learner_id, _ in told(run, Event.LOST, 0)] == [1]


@pytest.mark.parametrize(
    ("way", "heard"), seldom([("hardsync", 1)], [(way, heard) for way in ("hardsync", "async") for heard in (0, 1, 2)])
)
def test_a_spare_that_dies_while_it_takes_a_place_is_followed_by_the_next(way: str, heard: int, tmp_path: Path) -> None:
    """`heard`: how many shards it has told; shard 0 is the last."""
    succeed = SpareChannel.succeed

    def dies(channel: Any, learner_id: int, first_seq: int) -> int:
        ranks, machine = channel._ranks, package._machines[-1]
        if channel._wire.rank == 5:
            channel._ranks = ranks[2 - heard :]
            succeed(channel, learner_id, first_seq)
            process = machine.processes[5]
            process.at_call[process.calls + 1] = functools.partial(machine.kill, 5)
            channel._ranks = ranks
        return succeed(channel, learner_id, first_seq)

    with mock.patch.object(SpareChannel, "succeed", dies):
        run = weathered(drawn(way, 2, Fault("kill", 3, at_s=0.02), spares=2), tmp_path)
    assert [told(run, Event.SUCCEEDED, shard).count((1, 5.0)) for shard in range(2)] == [heard > 1, heard > 0]
    assert all(told(run, Event.SUCCEEDED, shard)[-1] == (1, 6.0) for shard in range(2))


def test_a_spare_that_is_never_wanted_leaves_with_the_others(tmp_path: Path) -> None:
    run = weathered(drawn("ssp", 2, spares=2), tmp_path)
    assert not told(run, Event.SUCCEEDED, 0)
    assert not told(run, Event.LOST, 0)


def test_a_learner_that_dies_as_it_evaluates_is_followed_by_a_spare(tmp_path: Path) -> None:
    """All have left but the one that evaluates; the spare is told to stop, says goodbye, and evaluates."""
    evaluate, dead = BuiltLearner._evaluate, list[int]()

    def dies(built: BuiltLearner, *words: Any, **fields: Any) -> None:
        if not dead:
            dead.append(built.rank)
            machine = package._machines[-1]
            process = machine.processes[built.rank]
            process.at_call[process.calls + 1] = functools.partial(machine.kill, built.rank)
            machine.kill(5 - built.rank)  # who has said goodbye, too
        evaluate(built, *words, **fields)

    with mock.patch.object(BuiltLearner, "_evaluate", dies):
        run = weathered(drawn("async", 2, learners=2), tmp_path)
    assert told(run, Event.SUCCEEDED, 0)
    assert len(run.evaluations)
    assert (tmp_path / "run-0" / "weights.pt").is_file()


HANGS = [(way, wakes, shards) for way in WAYS for wakes in (False, True) for shards in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "wakes", "shards"), seldom([("async", True, 1), ("hardsync", False, 2)], HANGS))
def test_a_spare_takes_the_place_of_a_learner_that_hangs(way: str, wakes: bool, shards: int, tmp_path: Path) -> None:
    """For longer than anybody is patient; one that wakes later is heard no more, and others end as if it had died."""
    learner, spare = shards + 1, shards + 3
    hangs = Fault("stop", learner, at_s=0.03, lasts_s=2 * PATIENCE_S if wakes else LONG_S)
    with mock.patch.dict(draw._OF_SGD, epochs=10):  # some go on without it, and would be done before anybody has lost patience
        run = weathered(drawn(way, shards, hangs), tmp_path)
    for shard in range(shards):
        assert told(run, Event.SUCCEEDED, shard) == [(1, spare)]
        assert {learner_id for learner_id, _ in told(run, Event.GOODBYE, shard)} == {0, 1, 2}


def test_a_spare_takes_the_place_of_the_only_learner(tmp_path: Path) -> None:
    """Which is never missed: somebody must be waited for."""
    run = weathered(drawn("hardsync", 2, Fault("stop", 2, at_s=0.03, lasts_s=LONG_S), learners=1), tmp_path)
    assert told(run, Event.SUCCEEDED, 0) == told(run, Event.SUCCEEDED, 1) == [(0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "heard"), thinned([(way, heard) for way in ("hardsync", "async") for heard in (0, 1, 2)], 12))
def test_a_spare_that_hangs_while_it_takes_a_place_is_followed_by_the_next(way: str, heard: int, tmp_path: Path) -> None:
    """`heard`: how many shards it has told; shard 0 is the last. When it wakes, it displaces nobody."""
    succeed = SpareChannel.succeed

    def hangs(channel: Any, learner_id: int, first_seq: int) -> int:
        ranks, machine = channel._ranks, package._machines[-1]
        if channel._wire.rank == 5:
            channel._ranks = ranks[2 - heard :]
            succeed(channel, learner_id, first_seq)
            process = machine.processes[5]
            process.at_call[process.calls + 1] = process.stop
            machine.at(int(3e9 * PATIENCE_S), process.go_on)
            channel._ranks = ranks
        return succeed(channel, learner_id, first_seq)

    with mock.patch.object(SpareChannel, "succeed", hangs), mock.patch.dict(draw._OF_SGD, epochs=30):
        run = weathered(drawn(way, 2, Fault("kill", 3, at_s=0.02), spares=2), tmp_path)
    assert all(told(run, Event.SUCCEEDED, shard)[-1] == (1, 6.0) for shard in range(2))
