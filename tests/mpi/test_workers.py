"""Worker processes on real ranks: with 0 and 2 of them a run has the same bits; none is left, also where the run fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from .conftest import Launched, launch

pytestmark = pytest.mark.slow

USER = """
import random
import sys

import numpy as np
import torch
from mpi4py import MPI  # which must not begin in a worker
from torch import nn
from torch.utils.data import DataLoader

import mpisgd

workers, out, fails = int(sys.argv[1]), sys.argv[2], len(sys.argv) > 3

class Samples:
    def __init__(self, fails):
        self.fails = fails
    def __len__(self):
        return 96
    def __getitem__(self, index):
        if self.fails and index > 90:
            raise OSError("sample cannot be read")
        drawn = torch.randn(4) + float(np.random.randn()) + random.random()
        return {"x": drawn + index % 3, "y": index % 3}

def data():
    return DataLoader(Samples(fails), num_workers=workers), None

def model():
    return nn.Linear(4, 3)

def step(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

if __name__ == "__main__":
    config = {"mu": 8, "epochs": 1, "threads": 1, "out": out, "protocol": "hardsync", "log": {"progress": "off"}}
    mpisgd.train(model=model, data=data, step=step, config=config)
"""


def left_behind(directory: Path) -> list[str]:
    """Command lines of the processes, but zombies, that were started in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == directory and "Z" not in (process / "stat").read_text().rpartition(")")[2].split()[0]:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def all_are_gone(directory: Path) -> bool:
    """At once, or soon: MPICH's launcher ends before the ranks of a failed job do."""
    deadline_s = time.monotonic() + 30
    while left_behind(directory) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not left_behind(directory)


def run(directory: Path, *words: str) -> Launched:
    return launch(3, str(directory / "user.py"), *words, timeout_s=240, cwd=directory)


def test_workers_change_nothing_and_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    for workers in ("0", "2"):
        done = run(tmp_path, workers, f"run{workers}")
        assert done.status == 0, done.text
        assert all_are_gone(tmp_path)
    one, other = (torch.load(tmp_path / f"run{workers}" / "weights.pt", weights_only=True)["theta"] for workers in (0, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    failed = run(tmp_path, "2", "failed", "fails")
    assert failed.status != 0
    assert "sample cannot be read" in failed.text
    assert all_are_gone(tmp_path)
