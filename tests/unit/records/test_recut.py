"""Slices cut anew: there and back gives the same bytes; mini-batches dealt on; what cannot be cut says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.data.sampling import EpochSampling, dealt_on
from mpisgd.records.checkpoint.checkpoint import Account, Checkpoint, Part
from mpisgd.records.checkpoint.recut import cut, recut, recut_snapshots
from mpisgd.records.log import schema
from mpisgd.vectors.flat import slice_bounds


@st.composite
def bounds(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, size - 1), max_size=6)) if size > 1 else set()
    edges = [0, *sorted(inner), size]
    return list(zip(edges, edges[1:], strict=False))


@given(st.data(), st.integers(1, 60))
def test_there_and_back(data: st.DataObject, size: int) -> None:
    old, new = data.draw(bounds(size)), data.draw(bounds(size))
    whole = {name: np.random.default_rng(at).normal(size=size).astype(np.float32) for at, name in enumerate(("weights", "m"))}
    begin = [{**{name: each[start:end] for name, each in whole.items()}, "step": np.float32(7)} for start, end in old]
    there = [cut(begin, old, wanted) for wanted in new]
    for (start, end), tensors in zip(new, there, strict=True):
        assert {name: each.tobytes() for name, each in tensors.items() if each.ndim} == {
            name: each[start:end].tobytes() for name, each in whole.items()
        }
    back = [cut(there, new, wanted) for wanted in old]
    for before, after in zip(begin, back, strict=True):
        assert {name: each.tobytes() for name, each in before.items()} == {name: each.tobytes() for name, each in after.items()}


def test_a_count_is_of_whoever_had_most() -> None:
    old = [{"weights": np.zeros(3, np.float32), "step": np.float32(4)}, {"weights": np.ones(5, np.float32), "step": np.float32(5)}]
    found = [cut(old, [(0, 3), (3, 8)], wanted) for wanted in ((0, 5), (2, 8))]
    assert [each["step"] for each in found] == [4, 5]
    assert found[0]["weights"].tolist() == [0, 0, 0, 1, 1]


def test_shards_with_other_tensors() -> None:
    """No optimiser here makes this tensor later."""
    old = [{"weights": np.zeros(3, np.float32), "momentum": np.zeros(3, np.float32)}, {"weights": np.zeros(3, np.float32)}]
    with pytest.raises(CheckpointError, match=r"different tensors.*momentum, weights; weights"):
        cut(old, [(0, 3), (3, 6)], (0, 6))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 50))
def test_learners_that_kept_step_leave_nothing_out(before: int, after: int, rounds: int) -> None:
    next_seq = dealt_on("epoch", [rounds] * before, after)
    used = {seq * before + learner_id for learner_id in range(before) for seq in range(rounds)}
    still = {seq * after + learner_id for learner_id in range(after) for seq in range(next_seq[learner_id], 500)}
    assert used | still >= set(range(400))
    assert not used & still
    assert max(next_seq) - min(next_seq) <= 1


def test_every_sample_once_per_epoch() -> None:
    """4 learners for 3 rounds, then 3: two epochs of 48 samples."""
    first, then = (EpochSampling(size=48, mu=4, lambda_=learners, seed=1) for learners in (4, 3))
    next_seq = dealt_on("epoch", [3] * 4, 3)
    assert next_seq == [4, 4, 4]
    seen = [index for learner_id in range(4) for seq in range(3) for index in first.indices(learner_id, seq)]
    seen += [index for learner_id in range(3) for seq in range(4, 8) for index in then.indices(learner_id, seq)]
    assert np.bincount(seen).tolist() == [2] * 48


def test_as_many_learners_go_on_with_their_own() -> None:
    assert dealt_on("epoch", [5, 9, 2], 3) == [5, 9, 2]
    assert dealt_on("epoch", [5, 9, 2], 2) == [8, 8], "16 were begun"
    assert dealt_on("own", [5, 9, 2], 2) == [8, 8], "as far in its epoch as they were on the whole"
    assert dealt_on("replacement", [5, 9, 2], 4) == [9, 9, 9, 9], "nobody draws the same again"


def checkpoint(path: Path) -> Checkpoint:
    accounts = [
        Account(
            shard=shard,
            bounds=wanted,
            clock=8,
            samples=64 + shard,
            now_s=1.0 + shard,
            received=9,
            applied_seq=[3, 3],
            next_seq=[4, 4],
            rows=[[0, 9, 8, 0, 1]],
            snapshots=[(0, 0, 0.1), (4, 32, 0.2), (8, 64, 0.3)][: 3 - shard],
            diverged=shard == 1,
        )
        for shard, wanted in enumerate(slice_bounds(7, 2))
    ]
    parts = tuple(Part(account, 1, 1) for account in accounts)
    return Checkpoint(path / "checkpoint" / "clock-000008", 8, 0, 2, "7 (abc)", parts)


def test_accounts_begin_alike(tmp_path: Path) -> None:
    found = recut(checkpoint(tmp_path), slice_bounds(7, 3), [3, 3, 2])
    assert (found.clock, found.learners, found.attempt, found.now_s) == (8, 3, 0, 2.0)
    for shard, part in enumerate(found.parts):
        account = part.account
        assert (account.shard, account.bounds) == (shard, slice_bounds(7, 3)[shard])
        assert (account.samples, account.received, account.rows, account.diverged) == (64, 0, [], True)
        assert (account.next_seq, account.applied_seq) == ([3, 3, 2], [2, 2, 1])
        assert account.snapshots == [(0, 0, 0.1), (4, 32, 0.2)]
    assert found.next_seq == [3, 3, 2]
    assert found.rows_before == [[0, 0, 9, 8, 0, 1], [1, 0, 9, 8, 0, 1]]
    with pytest.raises(CheckpointError, match="has 7 parameters, the model here has 8"):
        recut(checkpoint(tmp_path), slice_bounds(8, 3), [3, 3, 2])


def test_snapshots_are_cut_too(tmp_path: Path) -> None:
    before = checkpoint(tmp_path)
    vectors = np.arange(3 * 2 * 7, dtype=np.float32).reshape(3, 2, 7)  # snapshots, theta and thetabar, elements
    for part in before.parts:
        start, end = part.account.bounds
        vectors[: len(part.account.snapshots), :, start:end].tofile(tmp_path / schema.spool_file(part.account.shard))
    found = recut(before, slice_bounds(7, 3), [1])
    recut_snapshots(tmp_path, found, 2, 2)
    for part in found.parts:
        start, end = part.account.bounds
        read = np.fromfile(tmp_path / schema.spool_file(part.account.shard, 2), np.float32).reshape(2, 2, end - start)
        np.testing.assert_array_equal(read, vectors[:2, :, start:end])
    assert (tmp_path / schema.spool_file(0)).exists(), "another attempt may need it"
    with (tmp_path / schema.spool_file(1)).open("r+b") as file:
        file.truncate(5)
    with pytest.raises(DataError, match=r"\.snapshots-001 (has \d+ bytes|is not there): the checkpoint says 2"):
        recut_snapshots(tmp_path, found, 2, 2)


@pytest.mark.parametrize("name", ["missed", "momentum_buffer"])
def test_a_slice_without_what_begins_later_has_zeros(name: str) -> None:
    """SGD has no momentum before its first gradient: the first makes the same of zeros."""
    ones = np.ones(6, np.float32)
    old = [{"weights": ones[:3], f"optimizer.{name}": ones[:3]}, {"weights": ones[3:]}]
    found = cut(old, [(0, 3), (3, 6)], (1, 5))
    assert found[f"optimizer.{name}"].tolist() == [1, 1, 0, 0]
    assert f"optimizer.{name}" not in cut(old[1:], [(3, 6)], (4, 6))
