"""Users' HDF5 files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config import Hdf5Options
from mpisgd.data import load

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
    assert str(caught.value).startswith("data.path = 'none.h5': there is no such file; looked at: ")
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
