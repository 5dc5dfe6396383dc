"""Both ends of weights pulled as bfloat16: what goes to whom, what is kept, and answers that cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import Ending, Tag
from mpisgd.config import Config, replace
from mpisgd.exchange import deltas
from mpisgd.exchange.deltas import Common, Deltas, Each, Held
from mpisgd.protocols import AsyncOptions, BackupOptions, HardsyncOptions, SoftsyncOptions, VersionedOptions
from mpisgd.vectors.memory import SizedVector
from tests.unit.channels import SIZE, SLICE, Job
from tests.unit.gradient.test_rounding import gradients, to_bfloat16, widened

HALF = Config(pull_format="bfloat16")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bit_for_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes over several chunks, the last of which is shorter."""
    monkeypatch.setattr(deltas, "_CHUNK", 300)
    held, delta = torch.zeros(size), torch.zeros(size, dtype=torch.int16)
    expected = np.zeros(size, np.float32)
    for weights in gradients(30, size):
        deltas.advance(held, torch.from_numpy(weights), delta)
        sent = to_bfloat16(weights - expected)
        with np.errstate(over="ignore"):
            expected = expected + widened(sent)
        assert delta.numpy().view(np.uint16).tolist() == sent.tolist()
        assert held.numpy().tobytes() == expected.tobytes()


def sent(of: Deltas, learner_ids: list[int], weights: torch.Tensor, clock: int) -> list[tuple[list[int], int]]:
    return [(ids, body.nbytes) for ids, body in of.answers(learner_ids, weights, clock)]


def test_where_all_hold_the_same_who_missed_a_clock_is_sent_all_of_it() -> None:
    weights = torch.ones(3)
    of = Common(weights)
    of.begin(weights)
    assert sent(of, [0, 1, 2], weights, 0) == [([0, 1, 2], 12)]
    of.follow(weights.add_(1.001))
    assert sent(of, [0, 1], weights, 1) == [([0, 1], 6)]
    of.follow(weights.add_(1.001))
    assert sent(of, [2, 0], weights, 2) == [([0], 6), ([2], 12)]
    assert sent(of, [0], weights, 2) == [([0], 12)], "the same clock again"
    assert of.held.tolist() != weights.tolist()


def test_where_each_holds_its_own_it_is_forgotten_when_it_leaves() -> None:
    weights = torch.ones(3)
    of = Each(weights)
    assert sent(of, [0, 1], weights, 0) == [([0], 12), ([1], 12)]
    weights.add_(1.001)
    assert sent(of, [1], weights, 1) == [([1], 6)]
    of.gone(1)
    of.gone(7)
    assert sent(of, [0, 1], weights, 5) == [([0], 6), ([1], 12)]


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (HardsyncOptions(), Common), (BackupOptions(b=1), Common), (VersionedOptions(), Common),
        (VersionedOptions(tolerance=1), Each),        (SoftsyncOptions(), Each), (AsyncOptions(), Each),
    ],
)  # fmt: skip
def test_which_protocols_hold_what(protocol: Any, kind: type) -> None:
    assert type(deltas.of_run(HALF, protocol.make(2), torch.zeros(2))) is kind
    assert deltas.of_run(replace(HALF, pull_format="float32"), protocol.make(2), torch.zeros(2)) is None


@pytest.mark.parametrize("apart", [False, True])
def test_a_learner_that_steps_by_itself_goes_on_from_what_it_holds(apart: bool) -> None:
    weights = np.zeros(4, np.float32)
    held = Held(weights, [(0, 1), (1, 4)], apart=apart)
    assert [room.nbytes for room in held.rooms] == [4, 12]
    held.rooms[1][:] = np.array([1, 2, 3], np.float32).view(np.int16)
    held.take(1, 12)
    assert weights.tolist() == [0, 1, 2, 3]
    weights += 10 * apart
    held.rooms[1][:3] = torch.tensor([0.5, 0, -1]).bfloat16().view(torch.int16).numpy()
    held.take(1, 6)
    assert weights.tolist() == [10 * apart, 1.5, 2, 2]


def test_where_only_sizes_travel_they_are_half() -> None:
    vector = SizedVector(1000)
    held = Held(vector, [(0, 400), (400, 1000)], apart=True)
    assert [room.nbytes for room in held.rooms] == [1600, 2400]
    held.take(1, 1200)
    for of in (Common(vector[:400]), Each(vector[:400])):
        of.begin(vector[:400])
        found = [next(iter(of.answers([0], vector[:400], clock)))[1].nbytes for clock in (0, 1)]
        assert found == [1600, 800]


@pytest.mark.parametrize(
    ("first", "second"),
    [(SLICE // 2, None), (SLICE, SLICE // 2 + 2), (SLICE, 0), (SLICE, 2 * SLICE)],
    ids=["first", "odd", "none", "more"],
)
def test_an_answer_that_cannot_be(first: int, second: int | None) -> None:
    """The first pull is of all of it, in float32; and then of all, or of half the bytes."""
    job = Job(learners=1)
    learner = job.learners[0]
    learner._held = Held(job.weights[0], job.bounds, apart=False)
    learner._weights = [(room,) for room in learner._held.rooms]

    def answers() -> None:
        for clock, nbytes in enumerate((first, second)):
            if nbytes is not None:
                job.receive()
                wire = job.wires[0]
                body = np.ones(min(nbytes, SLICE) // 2, np.int16)
                wire.finish(wire.start(1, Tag.ANSWER, (0, clock, Ending.NONE, 0, 0, -1, 1, nbytes), body))

    def learn() -> None:
        learner.pull(0)
        assert second is not None
        learner.pull(1)

    number = 0 if second is None else 1
    with pytest.raises(
        PeerError, match=rf"ANSWER of rank 0: shard 0, \d+ bytes, clock {number}, .* expected shard 0, {SLICE} bytes"
    ):
        job.run({0: answers, 1: learn})
    assert SIZE == SLICE // 4
