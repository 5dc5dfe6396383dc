"""The user's own data on real ranks: samples that draw at random are replayed, and ranks with other data are named (law 5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment
from mpisgd.records.log.reader import Run

from .conftest import Launched, execute

pytestmark = pytest.mark.slow

USER = '''
import random

import numpy as np
import torch
from torch import nn

from mpisgd.comm.mpi.library import MPI

class Crops:
    """Each sample draws from torch, numpy and `random`."""
    classes = 3
    def __init__(self, samples):
        self.pictures = torch.randn(samples, 6, 6) + torch.arange(samples)[:, None, None] % 3  # no seed: the factory has one
    def __len__(self):
        return len(self.pictures)
    def __getitem__(self, index):
        row, column = torch.randint(0, 3, (2,)).tolist()
        part = self.pictures[index, row : row + 4, column : column + 4]
        part = part.flip(1) if random.random() < 0.5 else part
        return part + np.float32(0.1 * np.random.randn()), index % 3

def crops():
    return Crops(120), Crops(30)

def shuffled():
    """As who forgets a seed: three generators."""
    places = np.random.permutation(90)
    inputs = torch.randn(90, 4, 4) + random.random()
    return (inputs[places], torch.from_numpy(places % 3)), None

def uneven():
    samples = 100 + MPI.COMM_WORLD.rank
    return (torch.zeros(samples, 4, 4), torch.arange(samples) % 3), None

def own_generator():
    return (np.random.default_rng().normal(size=(90, 4, 4)), np.arange(90) % 3), None

def model():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3))

def other_model():
    module = model()
    nn.init.constant_(module[2].bias, MPI.COMM_WORLD.rank)
    return module

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()
    def forward(self, inputs):
        return self.inner(inputs), inputs

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))

def other_loss(output, target):
    return nn.functional.cross_entropy(output, target) * MPI.COMM_WORLD.rank

def float_loss(output, target):
    return nn.functional.cross_entropy(output, target).item()
'''
OWN = ("--model", "user:model", "--data", "user:crops", "--threads", "1", "--mu", "8", "--epochs", "3", "--log.progress", "off")
#: name -> the options of a run that ends well.
RUNS: dict[str, tuple[str, ...]] = {
    "hardsync": ("--protocol", "hardsync"),
    "softsync": ("--protocol", "softsync", "--protocol.n", "2"),
    "layerwise": ("--protocol", "softsync", "--per-layer", "--shards", "1"),
    "steps": ("--protocol", "downpour", "--protocol.n-push", "2", "--protocol.n-fetch", "4"),
    "teams": ("--protocol", "hardsync", "--aggregation", "node"),
    "allreduce": ("--protocol", "allreduce"),
    "shuffled": ("--data", "user:shuffled", "--protocol", "hardsync"),
}
#: name -> the options of one that is refused, and what it must say.
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lengths": (
        ("--data", "user:uneven"),
        ("data: rank 2 has another than rank 1: training samples: 102 on rank 2, 101 on rank 1", "rank 3 also differs from rank 1"),
    ),
    "draws": (("--data", "user:own_generator"), ("data: rank 2 has another than rank 1: inputs of training samples 0, ",)),
    "model": (("--model", "user:other_model"), ("model: rank 1 has another than rank 0: initial 2.bias", "rank 2-3 also differ")),
    "loss": (("--loss", "user:other_loss"), ("loss: rank 2 has another than rank 1: loss of a first mini-batch",)),
    "a tuple": (("--model", "user:Pair"), ("model: returned a tuple of 2 (Tensor, Tensor), and the loss fails",)),
    "a float": (("--loss", "user:float_loss"), ("loss: returned float", "expected a scalar tensor")),
    "lazy": (("--model", "user:lazy"), ("1.weight of a lazy module has no shape yet",)),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Launched]]:
    """The directory of all runs, and how each ended, on four ranks."""
    directory = tmp_path_factory.mktemp("own")
    (directory / "user.py").write_text(USER)
    wanted = RUNS | {name: options for name, (options, _) in REFUSED.items()}
    commands = [(4, directory, ("train", *OWN, *options, "--out", name.replace(" ", "-"))) for name, options in wanted.items()]
    return directory, dict(zip(wanted, execute(directory, commands, ranks=4), strict=True))


@pytest.fixture(scope="module")
def replayed(ended: tuple[Path, dict[str, Launched]]) -> dict[str, str]:
    """Of each run that ended well, the last line of its replay; by a process of its own, which imports the module of these runs."""
    script = (
        "import json, sys; from mpisgd.replay import replay;"
        " print(json.dumps({name: replay(name, trust=True).lines()[-1] for name in sys.argv[1:]}))"
    )
    directory, launched = ended
    command = [sys.executable, "-c", script, *(name for name in RUNS if launched[name].status == 0)]
    done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_random_samples_are_replayed_to_the_same_bits(
    ended: tuple[Path, dict[str, Launched]], replayed: dict[str, str], name: str
) -> None:
    directory, launched = ended
    assert launched[name].status == 0, launched[name].text
    assert replayed[name] == "identical: theta, 51 parameters, bit for bit"
    entry = Run(directory / name).environment["brought"]["model"]
    assert (entry["object"], entry["file"]) == ("user:model", str(directory / "user.py"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_or_cannot_be_is_refused_before_the_start(ended: tuple[Path, dict[str, Launched]], name: str) -> None:
    directory, launched = ended
    assert launched[name].status == 2
    for words in REFUSED[name][1]:
        assert words in launched[name].text
    assert "Traceback" not in launched[name].text
    assert not (directory / name.replace(" ", "-")).exists()
