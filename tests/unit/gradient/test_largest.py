"""The largest elements of a gradient with error feedback, beside the same by a sort; and what a shard takes for such a slice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.config import SgdOptions
from mpisgd.gradient.rounding import Largest, Rounded
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.memory import Memory, SizedVector
from mpisgd.vectors.push_format import PushFormat
from tests.unit.gradient.test_rounding import Computed, gradients
from tests.unit.update.give import come

TENTH = PushFormat("topk", 0.1)


def dense(words: np.ndarray, size: int) -> np.ndarray:
    indices, values = words[: len(words) // 2], words[len(words) // 2 :].view(np.float32)
    found = np.zeros(size, np.float32)
    found[indices] = values
    return found


def by_a_sort(wanted: np.ndarray, k: int) -> np.ndarray:
    """The k largest by magnitude, of equals those that come first; all else 0."""
    order = sorted(range(len(wanted)), key=lambda at: (-abs(float(wanted[at])), at))[:k]
    found = np.zeros_like(wanted)
    found[order] = wanted[order]
    return found


@pytest.mark.parametrize("bounds", [[(0, 1)], [(0, 10)], [(0, 95), (95, 200)], [(0, 1), (1, 3), (3, 200)]])
def test_bit_for_bit(bounds: list[tuple[int, int]]) -> None:
    """Of each slice by itself; some gradients have elements of few magnitudes, so that many are equal."""
    size = bounds[-1][1]
    mine, remainder, cuts = Largest(TENTH, bounds), np.zeros(size, np.float32), TENTH.cuts(bounds)
    drawn = [*gradients(20, size), *np.random.default_rng(2).integers(-2, 3, (20, size)).astype(np.float32)]
    for gradient in drawn:
        wanted = gradient + remainder
        told = mine.round(torch.from_numpy(gradient))
        for (start, end), (at, to) in zip(bounds, cuts, strict=True):
            k = math.ceil((end - start) / 10)
            assert to - at == 2 * k
            sent = by_a_sort(wanted[start:end], k)
            words = mine.bits[at:to]
            assert (np.diff(words[:k]) > 0).all()
            assert dense(words, end - start).tolist() == sent.tolist()
            assert TENTH.why_not(torch.from_numpy(words), end - start) == ""
            remainder[start:end] = wanted[start:end] - sent
        assert mine.remainder.numpy().tolist() == remainder.tolist()
        norms = [np.linalg.norm(each.astype(np.float64)) for each in (remainder, wanted)]
        assert told == pytest.approx(norms[0] / norms[1] if norms[1] else 0.0, rel=1e-4)


def test_all_of_a_gradient_is_pushed_in_time() -> None:
    mine, gradient, size = Largest(TENTH, [(0, 20)]), np.linspace(1, 2, 20, dtype=np.float32), 20
    pushed = np.zeros(size)
    for _ in range(400):
        mine.round(torch.from_numpy(gradient))
        pushed += dense(mine.bits, size)
    assert pushed + mine.remainder.numpy() == pytest.approx(400 * gradient, rel=1e-4)
    assert pushed == pytest.approx(400 * gradient, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_and_not_kept(bad: float) -> None:
    mine = Largest(PushFormat("topk", 0.5), [(0, 2), (2, 4)])
    mine.round(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert math.isnan(mine.round(torch.tensor([0.0, bad, 1.0, 1.0])))
    assert np.isnan(dense(mine.bits[:2], 2)[0])
    assert dense(mine.bits[2:], 2).tolist() == [4.0, 0.0], "of the other slice it is what it always is"
    assert mine.remainder.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert math.isfinite(mine.round(torch.ones(4)))


def test_a_norm_beyond_float32_is_no_mistake() -> None:
    mine = Largest(PushFormat("topk", 0.5), [(0, 2)])
    assert mine.round(torch.tensor([3e30, -4e30])) == pytest.approx(0.6)
    assert dense(mine.bits, 2).tolist() == [0.0, np.float32(-4e30)]


@pytest.mark.parametrize("drop", [False, True])
def test_shards_drop_alike(drop: bool) -> None:
    gradient = Rounded(Computed([math.nan, 1.0]), tell_nonfinite=drop, push_format=TENTH, slices=[(0, 1), (1, 2)])
    assert math.isnan(gradient.compute(0)) == drop
    assert math.isnan(gradient.rounded)


def test_where_only_sizes_travel_they_are_few() -> None:
    inner = Computed([0.0])
    inner.memory = Memory(SizedVector(1000), SizedVector(1000))
    gradient = Rounded(inner, tell_nonfinite=True, push_format=TENTH, slices=[(0, 333), (333, 1000)])
    (first, second), vector = gradient.memory.cuts, gradient.memory.gradients
    assert [vector[slice(*first)].nbytes, vector[slice(*second)].nbytes] == [8 * 34, 8 * 67]
    assert TENTH.sized(SizedVector(333)).nbytes == 8 * 34


def made(push_format: PushFormat) -> SliceUpdate:
    options: dict[str, Any] = {"learning_rate": 1.0, "schedule": lambda _: 1.0, "train_samples": 100}
    return SliceUpdate(torch.zeros(20), SgdOptions(momentum=0.0), **options, push_format=push_format)


def test_a_shard_takes_it_in_as_float32() -> None:
    update, mine = made(TENTH), Largest(TENTH, [(0, 20)])
    mine.round(torch.arange(20.0))
    for _ in range(2):
        came = come(update, mine.bits)
        assert came.memory.nbytes == mine.bits.nbytes == 16
        assert came.vector.tolist() == [0.0] * 18 + [18.0, 19.0]
        came.vector[:] = 7
        came.release()
    torn = update.bodies.take()
    torn.lose()
    assert not np.shares_memory(come(update, mine.bits).memory, torn.memory), "into the old one MPI may yet write"


@pytest.mark.parametrize("indices", [(-1, 3), (3, 20), (3, 3), (4, 3), (2**31 - 1, 0)])
def test_indices_that_cannot_be(indices: tuple[int, int]) -> None:
    update = made(TENTH)
    low, high = min(indices), max(indices)
    come(update, [*indices, 0, 0], why=f"indices from {low} to {high}: expected 0 ... 19, ascending")
