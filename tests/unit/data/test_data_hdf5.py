"""Users' HDF5 files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd import models
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config import Hdf5Options, SoftmaxOptions
from mpisgd.data import hdf5, load
from mpisgd.data.dataset import make_dataset, make_split

INPUTS = np.arange(48, dtype=np.float64).reshape(8, 2, 3)
TARGETS = np.arange(8, dtype=np.int16) % 4


def write(path: Path, **data_sets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in data_sets.items():
            file[name.replace("__", "/")] = value
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(
        tmp_path / "mine.h5",
        train__inputs=INPUTS,
        train__targets=TARGETS,
        test__inputs=INPUTS[:3],
        test__targets=TARGETS[:3],
    )


def test_the_default_layout(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(Hdf5Options(path=str(path)), seed=1)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (8, 3, (2, 3), 4)
    inputs, targets = data.train.batch(np.array([5, 1]))
    assert inputs.tolist() == INPUTS[[5, 1]].tolist()
    assert targets.tolist() == [1, 1]
    monkeypatch.setenv("MPISGD_DATA", str(path.parent))  # a relative path is looked for there too
    assert len(load(Hdf5Options(path="mine.h5"), seed=1).train) == 8


def test_other_names_no_test_split_and_the_mean(tmp_path: Path) -> None:
    bytes_ = INPUTS.astype(np.uint8)
    path = write(tmp_path / "other.h5", x=bytes_, y=TARGETS)
    options = Hdf5Options(path=str(path), train_inputs="x", train_targets="y", test_inputs="", subtract_mean=True)
    data = load(options, seed=1)
    assert len(data.test) == 0
    np.testing.assert_allclose(data.train.batch(np.arange(8))[0].numpy(), bytes_ - bytes_.mean(axis=0), atol=1e-5)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path = '': expected the path of an HDF5 file"):
        load(Hdf5Options(), seed=1)
    with pytest.raises(DataError) as caught:
        load(Hdf5Options(path="none.h5"), data_dir=str(tmp_path), seed=1)
    assert str(caught.value).startswith("data.path = 'none.h5': found no file; looked at: ")
    assert f"{Path.cwd()}/none.h5, {tmp_path}/none.h5" in str(caught.value)


def test_a_truncated_and_a_foreign_file(path: Path) -> None:
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no HDF5" * 100, b""):
        path.write_bytes(content)
        message = f"{re.escape(str(path))}: {len(content)} bytes found, expected a whole HDF5 file"
        with pytest.raises(DataError, match=message):
            load(Hdf5Options(path=str(path)), seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_inputs": "train/input"}, "there is no data set 'train/input'; did you mean 'train/inputs'"),
        ({"train_targets": "train"}, "there is no data set 'train'"),
        ({"train_targets": "test/targets"}, "train/inputs, test/targets: 8 inputs but 3 targets"),
        ({"train_inputs": "words"}, "words, train/targets: inputs are of type .*, expected numbers"),
        ({"train_inputs": "one"}, "one is a single value, expected the first axis to number the samples"),
        ({"train_inputs": "none", "train_targets": "none"}, "0 training samples, expected at least 1"),
        ({"train_targets": "negative"}, "a target is -4, expected classes from 0"),
        ({"test_inputs": "flat"}, r"test inputs have shape \(\), expected \(2, 3\)"),
    ],
)
def test_data_sets_that_cannot_be(path: Path, changes: dict[str, Any], message: str) -> None:
    with h5py.File(path, "a") as file:
        file["words"] = np.array([b"a"] * 8)
        file["one"] = 1.0
        file["none"] = np.zeros((0,))
        file["negative"] = TARGETS - 4
        file["flat"] = np.zeros(3)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}|{re.escape(str(path))}: {message}"):
        load(Hdf5Options(path=str(path), **changes), seed=1)


def test_the_mean_of_token_numbers_is_refused(path: Path) -> None:
    options = Hdf5Options(path=str(path), train_inputs="train/targets", test_inputs="", subtract_mean=True)
    with pytest.raises(ConfigError, match=r"data.subtract_mean = True: expected floats or uint8 in train/targets"):
        load(options, seed=1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is read of data sets, and which samples."""
    read, found = hdf5._Rows._read, []

    def told(self: hdf5._Rows, first: int, after: int) -> Any:
        found.append((self.name, first, after))
        return read(self, first, after)

    monkeypatch.setattr(hdf5._Rows, "_read", told)
    return found


@pytest.mark.parametrize("chunks", [None, (3, 2, 3), (2, 1, 2), (500, 2, 3)])
def test_mini_batches_are_read_and_nothing_else(
    tmp_path: Path, chunks: tuple[int, ...] | None, reads: list[tuple[str, int, int]]
) -> None:
    inputs = np.random.default_rng(0).normal(size=(500, 2, 3)).astype(">f4")
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("train/inputs", data=inputs, chunks=chunks, compression="gzip" if chunks else None)
        file["train/targets"] = np.arange(500) % 7
    data = load(Hdf5Options(path=str(tmp_path / "large.h5"), test_inputs="", cache_nbytes=0), seed=1)
    assert (len(data.train), data.classes) == (500, 7)
    assert {(after - first) for name, first, after in reads if name == "train/inputs"} <= {0}
    del reads[:]
    drawn = np.array([7, 499, 5, 6, 0, 7])
    read, targets = data.train.batch(drawn)
    assert torch.equal(read, torch.from_numpy(inputs.astype(np.float32)[drawn]))
    assert targets.tolist() == (drawn % 7).tolist()
    assert reads == [(f"train/{name}", *run) for name in ("inputs", "targets") for run in ((0, 1), (5, 8), (499, 500))]
    assert [len(part) for part in data.train.batch(np.zeros(0, np.int64))] == [0, 0]


def test_many_targets_are_not_searched(path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int, int]]) -> None:
    monkeypatch.setattr(hdf5, "_SEARCHED_NBYTES", 15)
    data = load(Hdf5Options(path=str(path)), seed=1)
    assert data.classes is None
    with pytest.raises(ConfigError, match=r"model 'softmax' needs the number of classes.* or `data.classes` for an HDF5 file"):
        models.make(SoftmaxOptions(), input_shape=data.input_shape, classes=data.classes, seed=1)
    assert load(Hdf5Options(path=str(path), classes=9), seed=1).classes == 9
    assert ("train/targets", 0, 8) not in reads
    monkeypatch.setattr(hdf5, "_SEARCHED_NBYTES", 16)
    monkeypatch.setattr(hdf5, "_BLOCK_NBYTES", 6)
    assert load(Hdf5Options(path=str(path)), seed=1).classes == 4
    assert [run for run in reads if run[0] == "train/targets"][-3:] == [("train/targets", *run) for run in ((0, 3), (3, 6), (6, 9))]


@pytest.mark.parametrize("kind", ["f4", "u1"])
def test_the_mean_has_the_bits_that_it_has_in_memory(tmp_path: Path, kind: str) -> None:
    inputs = (np.random.default_rng(0).normal(size=(700, 5)) * 50).astype(kind)
    targets = np.zeros(700, np.int64)
    few = {"test__inputs": inputs[:9], "test__targets": targets[:9]}
    path = write(tmp_path / "mean.h5", train__inputs=inputs, train__targets=targets, **few)
    data = load(Hdf5Options(path=str(path), subtract_mean=True), seed=1)
    train, test = (make_split(inputs[:size], targets[:size], "", DataError) for size in (700, 9))
    expected = make_dataset("", train, test, DataError, subtract=True)
    assert torch.equal(data.train.batch(np.arange(700))[0], expected.train.batch(np.arange(700))[0])
    assert torch.equal(data.test.batch(np.arange(9))[0], expected.test.batch(np.arange(9))[0])


def test_the_cache_has_at_least_a_chunk_and_advice_is_given(tmp_path: Path) -> None:
    path = tmp_path / "chunks.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("bad", (4000, 3, 32, 32), "u1", chunks=(2000, 1, 32, 32))
        file.create_dataset("good", (4000, 3, 32, 32), "u1", chunks=(16, 3, 32, 32))
        file.create_dataset("plain", (4000, 3, 32, 32), "u1")
        file["y"] = np.zeros(4000, np.int64)
    found = {}
    for name in ("bad", "good", "plain"):
        options = Hdf5Options(path=str(path), train_inputs=name, train_targets="y", test_inputs="", cache_nbytes=2**20)
        found[name] = load(options, seed=1).train
    assert found["bad"].advice == (
        f"{path}: bad has chunks of (2000, 1, 32, 32): 6,144,000 bytes are read for a sample of 3,072 without a cached"
        " chunk: store chunks of whole samples, e.g. (21, 3, 32, 32), or say data.cache_nbytes = 12288000"
    )
    assert found["good"].advice == found["plain"].advice == ""
    kept = [split._inputs._found.id.get_access_plist().get_chunk_cache()[1] for split in (found["bad"], found["good"])]
    assert kept == [2_048_000, 2**20]
    large = Hdf5Options(path=str(path), train_inputs="bad", train_targets="y", test_inputs="", cache_nbytes=12_288_000)
    assert load(large, seed=1).train.advice == ""


def test_a_chunk_that_is_damaged_is_told_of_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        images = file.create_dataset("train/inputs", data=INPUTS, chunks=(4, 2, 3), fletcher32=True)
        where = images.id.get_chunk_info(1).byte_offset
        file["train/targets"] = TARGETS
    with path.open("r+b") as raw:
        raw.seek(where)
        raw.write(b"\xff")
    train = load(Hdf5Options(path=str(path), test_inputs=""), seed=1).train
    train.batch(np.arange(4))
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: train/inputs cannot be read: .*"):
        train.batch(np.array([2, 5]))


def test_numbers_that_cannot_be(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.cache_nbytes = -1: expected a finite number >= 0"):
        Hdf5Options(path=str(path), cache_nbytes=-1)
    with pytest.raises(ConfigError, match=r"data.classes = -2: expected a finite number >= 0"):
        Hdf5Options(path=str(path), classes=-2)
