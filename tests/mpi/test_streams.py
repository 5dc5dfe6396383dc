"""A stream on real ranks: interrupted and gone on with, and read by workers, it gives the same bits as without, and as replay."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED
from mpisgd.job.parts import UserObjects

from .conftest import launch

pytestmark = pytest.mark.slow

USER = """
import itertools
import os
import random
import signal
import sys
import time

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import mpisgd

class Stream(IterableDataset):
    def __len__(self):
        return 96
    def __iter__(self):
        worker = get_worker_info()
        own = list(range(worker.id, 96, worker.num_workers)) if worker else list(range(96))
        while own:
            number = own.pop(random.randrange(min(4, len(own))))
            yield {"x": torch.randn(4) + number % 3, "y": number % 3}

def data():
    return DataLoader(Stream(), num_workers=int(os.environ["WORKERS"])), None

def model():
    return nn.Linear(4, 3)

calls = itertools.count()

def step(model, batch):
    if MPI.COMM_WORLD.rank == 1 and "interrupt" in sys.argv and model.training:
        call = next(calls)
        if call == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        if call > 5:
            time.sleep(0.05)  # until all have heard of it
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

if __name__ == "__main__":
    config = {
        "mu": 8, "epochs": 40, "threads": 1, "out": sys.argv[1], "protocol": "hardsync", "sampling": "stream",
        "log": {"progress": "off"}, "alpha0": 0.01,
    }
    resume = sys.argv[1] if sys.argv[2:] == ["resume"] else None
    mpisgd.train(model=model, data=data, step=step, config=config, resume=resume)
"""


def test_a_stream_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "streaming.py").write_text(USER)
    for words, workers, status in (
        (("whole",), "0", 0),
        (("apart", "interrupt"), "2", EXIT_INTERRUPTED),
        (("apart", "resume"), "0", 0),
    ):
        monkeypatch.setenv("WORKERS", workers)
        done = launch(3, "streaming.py", *words, timeout_s=240, cwd=tmp_path)
        assert done.status == status, done.text
    one, other = (torch.load(tmp_path / run / "weights.pt", weights_only=True)["theta"] for run in ("whole", "apart"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    monkeypatch.syspath_prepend(str(tmp_path))
    user = importlib.import_module("streaming")
    proof = replay.replay(tmp_path / "apart", UserObjects(model=user.model, data=user.data, step=user.step))
    assert (proof.reason, proof.other_losses) == ("", 0)
    assert all(each.elements == 0 for each in proof.differences)
