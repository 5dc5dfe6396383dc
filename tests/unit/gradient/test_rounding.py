"""Gradients as bfloat16 with error feedback, beside the same arithmetic on bits by numpy."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.config import SgdOptions
from mpisgd.gradient import rounding
from mpisgd.gradient.aggregate import Leader
from mpisgd.gradient.rounding import Rounded, Rounding
from mpisgd.simulate.sized import Memory, SizedVector
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Scaled, Travels
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import NOTHING
from tests.unit.update.give import come, give


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 rounded to its upper 16 bits, to nearest, ties to even: by integers alone."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def gradients(count: int, size: int, seed: int = 1) -> np.ndarray:
    """Of all magnitudes, with some zeros."""
    random = np.random.default_rng(seed)
    drawn = random.standard_normal((count, size)) * 10.0 ** random.integers(-12, 12, (count, size))
    return np.where(random.random((count, size)) < 0.1, 0, drawn).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bit_for_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes over several chunks, the last of which is shorter."""
    monkeypatch.setattr(rounding, "_CHUNK", 300)
    mine, remainder = Rounding(size), np.zeros(size, np.float32)
    for gradient in gradients(50, size):
        wanted = gradient + remainder
        sent = to_bfloat16(wanted)
        remainder = wanted - widened(sent)
        told = mine.round(torch.from_numpy(gradient))
        assert mine.bits.view(np.uint16).tolist() == sent.tolist()
        assert mine.sent.float().numpy().tobytes() == widened(sent).tobytes()
        assert mine.remainder.numpy().tobytes() == remainder.tobytes()
        assert (np.abs(remainder) <= np.abs(wanted) / 256).all()
        norms = [np.linalg.norm(each.astype(np.float64)) for each in (remainder, wanted)]
        assert told == pytest.approx(norms[0] / norms[1] if norms[1] else 0.0, rel=1e-4)


def test_nothing_is_lost_but_for_a_while() -> None:
    """A gradient that bfloat16 cannot tell from 1 counts all the same; without the remainder it would not."""
    mine, gradient = Rounding(1), torch.tensor([1.001])
    pushed = 0.0
    for _ in range(1000):
        mine.round(gradient)
        pushed += float(mine.sent)
    assert float(gradient.bfloat16()) == 1.0
    assert pushed + float(mine.remainder) == pytest.approx(1001.0, abs=1e-3)
    assert pushed == pytest.approx(1001.0, abs=1 / 128)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_is_not_finite_is_told_and_not_kept(bad: float) -> None:
    """3.4e38 is finite in float32, and rounds to infinity in bfloat16."""
    mine = Rounding(3)
    mine.round(torch.tensor([1.001, 2.0, 4.0]))
    kept = mine.remainder.clone()
    assert kept[0] != 0
    assert math.isnan(mine.round(torch.tensor([0.0, bad, 4.0])))
    assert not mine.sent.isfinite()[1]
    assert mine.sent.isfinite()[[0, 2]].all()
    assert mine.remainder[1] == 0
    assert mine.remainder[0] == kept[0] - mine.sent[0].float(), "of the others it is what it always is"
    assert math.isfinite(mine.round(torch.tensor([1.0, 1.0, 1.0])))


def test_a_norm_beyond_float32_is_no_mistake() -> None:
    """Its square is infinite, though the gradient is not: nothing is dropped for that."""
    mine = Rounding(2)
    assert mine.round(torch.tensor([3.01e30, 1.0])) == pytest.approx(abs(float(mine.remainder[0])) / 3.01e30, rel=1e-3)
    assert mine.sent.isfinite().all()


class Computed(Travels):
    """Leaves these gradients, one after the other."""

    samples = 4

    def __init__(self, *given: list[float]) -> None:
        self.given = [np.array(each, np.float32) for each in given]
        self.memory = Memory.zeros(len(given[0]))
        self.prepared: list[int] = []
        self.steps = 0

    def prepare(self, seq: int) -> None:
        self.prepared.append(seq)

    def interrupt_by(self, check: Any) -> None:
        self.check = check

    def compute(self, seq: int) -> float:
        self.memory.gradients[:] = self.given[seq]
        return 0.5 + seq

    def take_own_step(self) -> None:
        self.steps += 1


def test_a_rounded_gradient_is_otherwise_the_same() -> None:
    inner = Computed([1.001, 3.0], [0.0, 0.0])
    gradient = Rounded(inner, tell_nonfinite=True)
    assert gradient.memory.weights is inner.memory.weights
    gradient.prepare(0)
    gradient.take_own_step()
    gradient.interrupt_by(print)
    assert (inner.prepared, inner.steps, inner.check) == ([0], 1, print)
    assert gradient.compute(0) == 0.5
    assert gradient.samples == 4
    assert widened(gradient.memory.gradients).tolist() == [1.0, 3.0]
    assert gradient.rounded == pytest.approx(0.001 / math.hypot(1.001, 3), rel=1e-3)
    assert inner.memory.gradients.tolist() == [np.float32(1.001), 3.0], "the learner's own steps take it as it was computed"
    assert gradient.compute(1) == 1.5
    assert widened(gradient.memory.gradients)[0] == pytest.approx(0.001, rel=1e-2)


@pytest.mark.parametrize("drop", [False, True])
def test_shards_drop_alike_what_only_rounding_makes_infinite(drop: bool) -> None:
    gradient = Rounded(Computed([3.4e38, 1.0]), tell_nonfinite=drop)
    assert math.isnan(gradient.compute(0)) == drop
    assert math.isnan(gradient.rounded)


def test_where_only_sizes_travel_they_are_half() -> None:
    inner = Computed([0.0])
    inner.memory = Memory(SizedVector(1000), SizedVector(1000))
    inner.given = [np.zeros(1, np.float32)]
    inner.compute = lambda seq: 0.0  # type: ignore[method-assign]
    gradient = Rounded(inner, tell_nonfinite=True)
    assert (gradient.memory.weights.nbytes, gradient.memory.gradients.nbytes) == (4000, 2000)
    assert gradient.memory.gradients[100:350].nbytes == 500
    assert (gradient.compute(0), gradient.rounded) == (0.0, 0.0)


def made(size: int = 4, *, half: bool) -> SliceUpdate:
    options, how = SgdOptions(momentum=0.0), PushFormat("bfloat16" if half else "float32")
    return SliceUpdate(torch.zeros(size), options, learning_rate=1.0, schedule=lambda _: 1.0, train_samples=100, push_format=how)


def test_a_shard_takes_it_in_as_float32() -> None:
    update, told = made(half=True), Rounding(4)
    for values in ([1.0, -2.5, 0.0, 1.001], [1.0, 1.0, 1.0, 0.0]):
        told.round(torch.tensor(values))
        came = come(update, told.bits)
        assert came.vector.tolist() == told.sent.float().tolist()
        give(update, came, 1.0, 4)
    update.step()
    assert update.weights.tolist() == [-1.0, 0.75, -0.5, pytest.approx(-0.5005, abs=1e-5)]


def test_what_is_kept_for_later_is_not_received_over() -> None:
    update, told, kept = made(half=True), Rounding(4), []
    for value in (1.0, 2.0):
        told.round(torch.full((4,), value))
        kept.append(come(update, told.bits))
    assert [each.vector.tolist() for each in kept] == [[1.0] * 4, [2.0] * 4]


def test_a_torn_gradient_may_yet_come_without_harm() -> None:
    update = made(half=True)
    torn, told = update.bodies.take(), Rounding(4)
    torn.lose()
    told.round(torch.ones(4))
    came = update.bodies.take()
    came.memory[:] = told.bits
    torn.memory.fill(-1)  # MPI writes there
    assert came.arrive(NOTHING) == ""
    assert came.vector.tolist() == [1.0] * 4


def test_in_float32_nothing_is_copied() -> None:
    update = made(half=False)
    came = come(update, 3.0)
    assert np.shares_memory(came.memory, came.vector)
    assert came.vector.tolist() == [3.0] * 4


def test_a_team_rounds_its_sum() -> None:
    class Team:
        memory = Memory(np.zeros(2, np.float32), np.array([1.001, 2.0], np.float32))
        gradient = types.SimpleNamespace(scaled=Scaled())
        skipped = NOTHING

        def begin(self, seq: int | None) -> None: ...

        def compute(self, seq: int) -> tuple[list[float], int]:
            return [1.0, 2.0], 8

    member: Any = Team()
    gradient = Rounded(Leader(member, drop_nonfinite=False), tell_nonfinite=False)
    assert gradient.compute(0) == 1.5
    assert gradient.samples == 8
    assert widened(gradient.memory.gradients).tolist() == [1.0, 2.0]
