"""Snapshots travel to the evaluator alone, slice by slice, and what cannot be one is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import (
    FINAL,
    NOTHING_MORE,
    Lost,
    SnapshotPull,
    Tag,
)
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.survivors import Survivors
from tests.unit.channels import SIZE, Door, Job, header
from tests.virtual.scene import packed


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


def tolerant_door(shard: int, evaluator: bool) -> tuple[Door, Survivors]:
    """Of two shards, ranks 0 and 1; learners are ranks 2 and 3, the evaluator, where there is one, rank 4."""
    door, roles = Door(), packed(2, 2, evaluator=evaluator).made_tolerant()
    survivors = Survivors(door.wire, roles, shard)
    door.shard = ShardChannel(door.wire, roles, shard, survivors=survivors)
    return door, survivors


def pulls_a_snapshot(door: Door, source: int, number: int) -> bool:
    """Whether it is believed."""
    door.comes(source, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, number, 0))
    return door.receive() == SnapshotPull(number, 0)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("number", [3, FINAL, NOTHING_MORE])
def test_a_learner_pulls_no_snapshot(shard: int, number: int) -> None:
    for evaluator in (False, True):
        door, _ = tolerant_door(shard, evaluator)
        assert not pulls_a_snapshot(door, 2, number)
        assert not pulls_a_snapshot(door, 3, number)


def test_the_evaluator_says_to_shard_0_alone_that_nothing_more_is_evaluated() -> None:
    (first, _), (other, _) = tolerant_door(0, evaluator=True), tolerant_door(1, evaluator=True)
    for door in (first, other):
        assert pulls_a_snapshot(door, 4, 0)
    assert not pulls_a_snapshot(other, 4, NOTHING_MORE), "shard 0 passes it on"
    assert pulls_a_snapshot(other, 0, NOTHING_MORE)
    assert pulls_a_snapshot(first, 4, NOTHING_MORE)


def test_an_evaluator_whose_place_shard_0_has_taken_counts_as_lost() -> None:
    """It was given up, and goes on: its place is not its own any more."""
    (first, its), (other, others) = tolerant_door(0, evaluator=True), tolerant_door(1, evaluator=True)
    its.lose_evaluator()
    assert its.evaluates
    assert pulls_a_snapshot(other, 0, 0), "shard 0 tells no more than by what it asks"
    for door, survivors in ((first, its), (other, others)):
        assert survivors.evaluator_rank == 0
        door.comes(4, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 1, 0))
        assert door.receive() == Lost(4, -1)
    assert not others.evaluates
