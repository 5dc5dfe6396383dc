"""Snapshots are copies: the evaluator must see the weights of their moment, whatever the shard has done since."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.base.errors import DataError
from mpisgd.config import SgdOptions
from mpisgd.records.checkpoint.snapshots import Snapshots, check_spool
from mpisgd.update.average import Average
from mpisgd.update.slice_update import SliceUpdate

SIZE = 1000


@pytest.mark.parametrize("averaging", [0.0, 0.5])
def test_what_was_taken_is_given_in_any_order(averaging: float, tmp_path: Path) -> None:
    average = Average.of(torch.zeros(SIZE), averaging)
    update = SliceUpdate(
        torch.zeros(SIZE), SgdOptions(), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=8, average=average
    )
    vectors = 2 if averaging else 1
    snapshots = Snapshots(tmp_path / "spool", every_epochs=1.0, vectors=vectors, size=SIZE)
    expected = []
    for clock in range(5):
        update.weights.add_(torch.arange(SIZE) + clock)
        update.samples = 16 * clock
        if update.averaged is not None:
            update.averaged.fill_(-clock)
        snapshots.take(update, clock, clock / 2)
        expected.append([update.served.copy(), np.full(SIZE, -clock, np.float32)][:vectors])
        if clock == 2:
            assert snapshots.get(0).clock == 0  # reading in between must not spoil where the next one goes
    update.weights.zero_()
    assert snapshots.count == 5
    for index in (4, 0, 2, 1, 3, 3):
        taken = snapshots.get(index)
        assert (taken.clock, taken.samples, taken.taken_s) == (index, 16 * index, index / 2)
        np.testing.assert_array_equal(taken.vectors, expected[index])
    assert [len(vector) for vector in snapshots.nothing()] == [0] * vectors
    snapshots.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0, 4 * SIZE + 3, 12 * SIZE - 1])
def test_a_bit_of_a_spool(place: int, tmp_path: Path) -> None:
    """Whoever goes on with the run is told, and else the evaluator: not another number in its place."""
    update = SliceUpdate(torch.zeros(SIZE), SgdOptions(), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=8)
    path, number = tmp_path / "spool", place // (4 * SIZE)
    snapshots = Snapshots(path, every_epochs=1.0, vectors=1, size=SIZE)
    for clock in range(3):
        update.weights.add_(torch.arange(SIZE))
        snapshots.take(update, clock, 0.5)
    taken = snapshots.taken
    check_spool(path, taken, 4 * SIZE)
    content = bytearray(path.read_bytes())
    content[place] ^= 2
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"spool is damaged: the checksum of snapshot {number} does not match"):
        check_spool(path, taken, 4 * SIZE)
    again = Snapshots(path, every_epochs=1.0, vectors=1, size=SIZE, resumed=taken)
    for index in range(3):
        if index != number:
            assert again.get(index).vectors[0][1] == index + 1
    with pytest.raises(DataError, match=f"spool is damaged: the checksum of snapshot {number} does not match"):
        again.get(number)
    again.close(keep=True)
    old = [each[:3] for each in taken]  # of an earlier mpisgd
    check_spool(path, old, 4 * SIZE)
    Snapshots(path, every_epochs=1.0, vectors=1, size=SIZE, resumed=old).get(number)


@given(every=st.sampled_from([0.25, 1.0, 2.5]), steps=st.lists(st.integers(1, 40), max_size=30))
def test_one_is_due_whenever_a_multiple_was_passed(
    every: float, steps: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where an update takes the run past several of them: one snapshot, not several of the same weights."""
    snapshots = Snapshots(tmp_path_factory.mktemp("s") / "spool", every_epochs=every, vectors=1, size=1)
    edges = np.cumsum([0, *steps]) / 16
    due = [snapshots.due(before, after) for before, after in zip(edges[:-1], edges[1:], strict=True)]
    multiples = [int(edge // every) for edge in edges]
    assert due == [a < b for a, b in zip(multiples[:-1], multiples[1:], strict=True)]
    snapshots.close()


def test_only_the_first_and_last_weights_are_kept_where_nothing_is_due(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "spool", every_epochs=0.0, vectors=1, size=1)
    assert not snapshots.due(0.0, 1000.0)
    snapshots.close()


def test_snapshots_go_on_where_they_were(tmp_path: Path) -> None:
    update = SliceUpdate(torch.zeros(SIZE), SgdOptions(), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=8)
    first = Snapshots(tmp_path / "spool", every_epochs=1.0, vectors=1, size=SIZE)
    for clock in range(3):
        update.weights.fill_(clock)
        first.take(update, clock, 0.5 * clock)
    taken = first.taken
    first.close(keep=True)
    again = Snapshots(tmp_path / "spool", every_epochs=1.0, vectors=1, size=SIZE, resumed=taken[:2])
    update.weights.fill_(7.0)
    again.take(update, 5, 9.0)
    assert [again.get(number).vectors[0][0] for number in range(3)] == [0.0, 1.0, 7.0]
    assert [again.get(number).clock for number in range(3)] == [0, 1, 5]
    again.close()
    assert not list(tmp_path.iterdir())
