"""Worker processes on real ranks: with 0, 2 and 4 of them, and 1, 2 and 3 shards, a run of random crops is the same plain loop, and
proved; none is left, also where the run fails."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import default_collate

from mpisgd import replay
from mpisgd.base.draws import seed_all, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config.config_file import of_run
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects

from .conftest import launch

pytestmark = pytest.mark.slow

USER = """
import torch
from mpi4py import MPI  # which must not begin in a worker
from torch import nn
from torch.utils.data import DataLoader

import mpisgd

class Samples:
    def __len__(self):
        return 96
    def __getitem__(self, index):
        if index > 90:
            raise OSError("sample cannot be read")
        return {"x": torch.randn(4) + index % 3, "y": index % 3}

def data():
    return DataLoader(Samples(), num_workers=2), None

def model():
    return nn.Linear(4, 3)

def step(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

if __name__ == "__main__":
    config = {"mu": 8, "epochs": 1, "threads": 1, "out": "run", "protocol": "hardsync", "log": {"progress": "off"}}
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


def test_no_worker_of_a_run_that_fails_is_left(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    failed = launch(3, str(tmp_path / "user.py"), timeout_s=240, cwd=tmp_path)
    assert failed.status != 0
    assert "sample cannot be read" in failed.text
    assert all_are_gone(tmp_path)


#: On five ranks, of which each run takes two learners and its shards.
CROPS = """
import random
import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader

import mpisgd

class Crops:
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.pictures = torch.randn(80, 6, 6, generator=generator)
    def __len__(self):
        return len(self.pictures)
    def __getitem__(self, index):
        row, column = torch.randint(0, 3, (2,)).tolist()
        part = self.pictures[index, row : row + 4, column : column + 4]
        part = part.flip(1) if random.random() < 0.5 else part
        return {"picture": part + np.float32(0.1 * np.random.randn()), "target": index % 3}

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

def step(model, batch):
    return nn.functional.cross_entropy(model(batch["picture"]), batch["target"])

def data_of(workers):
    return lambda: (DataLoader(Crops(), num_workers=workers, shuffle=True), None)

def train(out, protocol, shards, workers):
    comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 2 + shards else MPI.UNDEFINED)
    if comm != MPI.COMM_NULL:
        config = {
            "mu": 4, "epochs": 1, "threads": 1, "out": out, "protocol": protocol, "shards": shards, "alpha0": 0.01,
            "optimizer": "adamw", "log": {"progress": "off"},
        }
        mpisgd.train(model=model, data=data_of(workers), step=step, config=config, comm=comm)

if __name__ == "__main__":
    for name in sys.argv[1:]:
        protocol, shards, workers = name.split("-")
        train(name, protocol if protocol == "hardsync" else {"name": "softsync", "n": 2}, int(shards), int(workers))
"""


TRAINED = ("hardsync-1-0", "hardsync-2-0", "hardsync-3-0", "softsync-2-0", "hardsync-2-2", "softsync-2-2", "hardsync-3-4")
"""Protocol, shards, workers of each learner: every number of either."""


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("crops_by_workers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_loop(path: Path, user: ModuleType) -> dict[str, torch.Tensor]:
    """Of torch, over the mini-batches of two learners, each cropped with the seeds of its name."""
    config, user_objects = of_run(path), UserObjects(model=user.model, data=user.data_of(0), step=user.step)
    data = parts.load_data(config, user_objects)
    meta = parts.meta_of(data)
    model, samples, dealt = parts.build_model(config, meta, user_objects).module, user.Crops(), parts.make_sampling(config, meta, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.alpha0)
    for seq in range(len(samples) // (2 * config.mu)):
        optimizer.zero_grad()
        for learner_id in range(2):
            seed_all(seeds_of(Domain.SAMPLES, config.seed, learner_id, seq))
            batch = default_collate([samples[index] for index in dealt.indices(learner_id, seq).tolist()])
            (user.step(model, batch) / 2).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_random_crops_by_any_number_of_workers_are_a_plain_loop_and_proved(tmp_path: Path) -> None:
    (tmp_path / "crops.py").write_text(CROPS)
    done = launch(5, str(tmp_path / "crops.py"), *TRAINED, timeout_s=600, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.status == 0, done.text
    assert all_are_gone(tmp_path)
    user = imported(tmp_path / "crops.py")
    expected = plain_loop(tmp_path / "hardsync-1-0", user)
    for name in TRAINED:
        user_objects = UserObjects(model=user.model, data=user.data_of(int(name[-1])), step=user.step)
        found = torch.load(tmp_path / name / "weights.pt", weights_only=True)["theta"]
        for parameter, value in expected.items():
            near = torch.allclose(found[parameter], value, rtol=1e-4, atol=1e-6)
            assert near or name.startswith("softsync"), (name, parameter)
        assert replay.check(tmp_path / name, user_objects) == "", name
