"""Weights that are made and sent chunk by chunk are those that are made as a whole, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    LambOptions,
    LarsOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
)
from mpisgd.update import optimizer
from mpisgd.update.average import Average
from mpisgd.update.groups import Segment
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import chunks
from mpisgd.vectors.memory import SizedVector, host_vector
from tests.unit.update.give import come, give

SIZE = 1000
OPTIMIZERS = (
    SgdOptions(momentum=0.0),
    SgdOptions(momentum=0.9),
    SgdOptions(momentum=0.9, nesterov=True, weight_decay=0.01),
    AdagradOptions(),
    RmspropOptions(),
    AdamOptions(),
    AdamwOptions(),
    LarsOptions(),
    LambOptions(),
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NBYTES", 4 * 64)


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 1000])
def test_chunks_follow_each_other_from_the_first_element_to_the_last(elements: int, small_chunks: None) -> None:
    vector = np.arange(elements, dtype=np.float32)
    parts = chunks.chunks_of(vector)
    np.testing.assert_array_equal(np.concatenate(parts), vector)
    assert all(np.shares_memory(part, vector) for part in parts)
    assert [len(part) for part in parts[:-1]] == [64] * (len(parts) - 1)
    assert len(parts) == len(list(chunks.cuts(vector.nbytes))) == -(-elements // 64)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.01])
@pytest.mark.parametrize(
    ("mib", "wanted", "count"),
    [
        *((mib, 64, count) for mib, count in ((0.01, 1), (0.2, 2), (1, 8), (7, 56), (8, 64), (20, 64), (128, 64), (130, 65))),
        *((mib, 8, count) for mib, count in ((0.01, 1), (0.2, 2), (0.5, 4), (1, 8), (7, 8), (16, 8), (17, 9), (200, 100))),
    ],
)
def test_streamed_slices_have_as_many_chunks_as_wanted_but_none_tiny_or_huge(
    mib: float, wanted: int, count: int, share: float
) -> None:
    largest = int(mib * 2**18)
    size = int(share * largest)
    assert chunks.count_of([(0, size), (size, size + largest)], wanted) == count
    parts = list(chunks.cuts(4 * size, count))
    assert len(parts) in ({count} if size == largest else range(1, count + 1))
    assert [part.stop for part in parts] == [size, *(part.start for part in parts[:-1])], "the last elements first"
    assert parts[-1].start == 0
    assert all((part.stop - part.start) % 16 == 0 for part in parts[1:]), "registers are filled"


def test_sizes_and_nothing_are_one_chunk(small_chunks: None) -> None:
    sized = SizedVector(1000)
    assert chunks.chunks_of(sized) == [sized]
    assert len(chunks.chunks_of(np.zeros(0, np.float32))) == 1


#: None of them begins where a chunk, or a register of the CPU, does; one is longer than a chunk.
SEGMENTS = (
    Segment(0, 77),
    Segment(77, 90, 0.5, 0.25),
    Segment(90, 431, 1.0, 0.0),
    Segment(431, 432, 0.5, 0.25),
    Segment(432, 997, 2.0),
    Segment(997, SIZE, 0.0),
)


def made(
    options: OptimizerOptions, *, chunked: bool, averaging: float, gradients: int, segments: Sequence[Segment] = ()
) -> tuple[list[np.ndarray], SliceUpdate]:
    """The weights after each of four updates, the learning rate halved after the second; chunk by chunk, or by `step`."""
    generator = torch.Generator().manual_seed(1)
    weights = host_vector(SIZE).copy_(torch.randn(SIZE, generator=generator))
    update = SliceUpdate(
        weights,
        options,
        learning_rate=0.1,
        schedule=lambda epochs: 0.5 if epochs >= 2 * gradients else 1.0,
        train_samples=1,
        average=Average.of(weights, averaging),
        segments=segments,
    )
    found = []
    for _ in range(4):
        for place in range(gradients):
            came = come(update, torch.randn(SIZE, generator=generator).numpy())
            assert came.is_finite()
            give(update, came, 0.7 if place == 0 else 1.0 / 3, samples=1, last=chunked and place == gradients - 1)
        if chunked:
            update.begin_step()
            seen = [part.copy() for part in update.chunks()]  # each is made by the time that it is there
            assert len(seen) == update.chunks_count == 16
            found.append(np.concatenate(seen))
            np.testing.assert_array_equal(found[-1], update.served)
        else:
            update.step()
            found.append(update.served.copy())
    return found, update


@pytest.mark.parametrize("segments", [(), SEGMENTS], ids=["", "groups"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gradients", [1, 3])
@pytest.mark.parametrize("options", OPTIMIZERS, ids=repr)
def test_chunk_by_chunk_has_the_bits_of_the_whole(
    options: OptimizerOptions,
    gradients: int,
    fused: bool,
    segments: Sequence[Segment],
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer, "CACHED_NBYTES", 0 if fused else 10**6)
    whole, one = made(options, chunked=False, averaging=0.9, gradients=gradients, segments=segments)
    parts, other = made(options, chunked=True, averaging=0.9, gradients=gradients, segments=segments)
    for expected, found in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(found, expected)
    for (name, expected), found in zip(one.state().items(), other.state().values(), strict=True):
        assert torch.equal(found, expected), name
    assert (one.samples, one.learning_rate) == (other.samples, other.learning_rate) == (4 * gradients, 0.05)


def test_the_first_chunk_is_made_before_the_last(small_chunks: None) -> None:
    """So that it can be on its way: otherwise chunks would be good for nothing."""
    update = SliceUpdate(host_vector(SIZE), SgdOptions(momentum=0.0), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=1)
    give(update, -1.0, 1.0, samples=1, last=True)
    update.begin_step()
    first = next(update.chunks())
    assert set(first.tolist()) == {1.0}
    assert set(update.served[64:].tolist()) == {0.0}


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (1e30, True), (np.nan, False), (np.inf, False)])
@pytest.mark.parametrize("at", [0, 500, SIZE - 1])
def test_a_sum_is_looked_at_chunk_by_chunk(value: float, finite: bool, at: int, small_chunks: None) -> None:
    """The square of 1e30 is too large for float32: then the whole is looked at again."""
    update = SliceUpdate(host_vector(SIZE), SgdOptions(momentum=0.0), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=1)
    update.checks_sums = True
    for bad in (0.0, value):
        gradient = np.ones(SIZE, np.float32)
        gradient[at] = bad
        give(update, gradient, 0.5, samples=1, last=bad == value)
    update.begin_step()
    assert len(list(update.chunks())) == 16
    assert update.sum_is_finite() == finite
