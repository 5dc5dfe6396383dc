"""Whole jobs on a file that is read by mini-batches: the bits of those that have the same data in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd.job.parts import UserObjects
from mpisgd.replay import replay
from tests.effort import spread
from tests.virtual.jobs import TENSORS, simulated
from tests.virtual.test_optimisers import weights

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(90, 6)).astype(np.float32)
TARGETS = (INPUTS[:, :3]).argmax(axis=1)
SPLITS = {"train": slice(0, 70), "test": slice(70, 90)}


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "sampling": "own"},
            {"protocol": "hardsync"},
            {"protocol": "hardsync", "shards": 2, "sampling": "own"},
            {"protocol": {"name": "softsync", "n": 4}, "evaluation": {"train": True}},
        ],
        4,
    ),
    ids=str,
)
def test_it_is_the_run_that_has_the_data_in_memory(changes: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, part in SPLITS.items():
            file.create_dataset(f"{name}/inputs", data=INPUTS[part], chunks=(4, 6), compression="gzip")
            file[f"{name}/targets"] = TARGETS[part]
    simulated(tmp_path / "file", {**TENSORS, "data": {"name": "hdf5", "path": str(tmp_path / "data.h5")}}, **changes)
    assert replay(tmp_path / "file").holds
    user_objects = UserObjects(data=tuple((INPUTS[part], TARGETS[part]) for part in SPLITS.values()))
    simulated(tmp_path / "memory", TENSORS, user_objects, **changes)
    one, other = weights(tmp_path / "file"), weights(tmp_path / "memory")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_user_is_told_of_chunks_that_cost_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("train/inputs", data=np.zeros((20_000, 6), np.float32), chunks=(12_000, 6))
        file["train/targets"] = np.arange(20_000) % 3
    data = {"name": "hdf5", "path": str(tmp_path / "data.h5"), "test_inputs": "", "cache_nbytes": 0}
    simulated(tmp_path / "run", {**TENSORS, "data": data, "epochs": 0.003})
    told = "train/inputs has chunks of (12000, 6): 288,000 bytes are read for a sample of 24 without a cached chunk"
    assert capsys.readouterr().err.count(told) == 1
