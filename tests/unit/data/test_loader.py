"""Batches that worker processes fetch are those that the learner would fetch by itself; and no worker is left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from mpisgd.base.draws import Seeds, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import Config
from mpisgd.data import Split, as_dataset, check_workers, fetch, loader
from mpisgd.data.dataset import LazySplit
from mpisgd.data.loader import CollatedSplit, ReadAhead, Workers, workers_of
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.vectors import nest


class Crops:
    """Samples that draw from torch, numpy and `random`, as dicts of unequal lengths; the last one cannot be had."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == len(self) - 1:
            raise OSError("sample 31 cannot be read")
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        return {"x": torch.tensor([index, *drawn, os.getpid()])[: 4 + index % 2]}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """What a collate function draws is seeded, too."""
    x = [sample["x"][:4] for sample in samples]
    return {"x": torch.stack(x), "noise": torch.rand(2), "pids": [os.getpid() for _ in samples]}


def named(seq: int) -> tuple[np.ndarray, Seeds]:
    """Three samples of the first 24."""
    return (np.arange(3) + 3 * seq) % 24, seeds_of(Domain.SAMPLES, 7, 1, seq)


def by_itself(split: Split, seq: int) -> Any:
    indices, seeds = named(seq)
    return fetch(split, indices, lambda: seeds)


def split_of(workers: int = 0, **how: Any) -> LazySplit:
    more = {"num_workers": workers, **how} if workers else how
    split = as_dataset((DataLoader(Crops(), collate_fn=padded, **more), None), nested=True).train  # type: ignore[arg-type]
    assert isinstance(split, CollatedSplit)
    return split


def equal(one: Any, other: Any) -> bool:
    here, there = nest.tensors_of(one), nest.tensors_of(other)
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.slow  # each worker imports torch
@pytest.mark.parametrize(("workers", "method"), [(2, "spawn"), (1, "forkserver")])
def test_workers_fetch_what_the_learner_would(workers: int, method: str) -> None:
    """In any order that is asked for; what this process draws is left alone; what a sample raises is raised here; then they end."""
    split = split_of(workers, multiprocessing_context=method)
    ahead = ReadAhead(split, split.workers, lambda seq: named(seq) if seq < 20 else (np.array([31]), named(seq)[1]), pinned=False)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for seq in (0, 1, 2, 3, 4, 9, 10, 1):  # and from another one on, as after a checkpoint
        batch = ahead.get(seq)
        assert equal(batch, by_itself(split, seq)), seq
        assert os.getpid() not in batch["pids"]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(multiprocessing.active_children()) == workers
    with pytest.raises(OSError, match="sample 31 cannot be read"):
        ahead.get(20)
    ahead.close()
    assert multiprocessing.active_children() == []
    assert "MPI4PY_RC_INITIALIZE" not in os.environ


def test_what_a_worker_is_asked_is_what_a_learner_asks_itself() -> None:
    """The same without processes, in which a loader of torch without workers fetches."""
    split = split_of()
    order = loader._Order(named, 5)
    inside = DataLoader(loader._Fetching(split), sampler=order, batch_size=None, collate_fn=loader._as_it_is)  # type: ignore[arg-type]
    for seq, batch in zip(range(5, 9), itertools.islice(inside, 4), strict=True):
        assert equal(batch, by_itself(split, seq))
    assert not equal(by_itself(split, 5), by_itself(split, 6))


def test_a_worker_that_aborts_as_it_ends_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen under load: torch's threads of a worker abort while Python ends it, and torch raises that in the learner."""

    def aborts() -> None:
        raise RuntimeError("DataLoader worker (pid 29410) is killed by signal: Aborted.")

    split = split_of()
    ahead = ReadAhead(split, loader.Workers(1), named, pinned=False)
    monkeypatch.setattr(ahead, "_iterator", SimpleNamespace(_shutdown_workers=aborts))
    ahead.close()
    assert ahead._iterator is None


SCRIPT = """
import faulthandler, os, signal, sys
if __name__ != "__main__":  # a worker
    faulthandler.dump_traceback_later(100)
from multiprocessing import active_children
from tests.unit.data.test_loader import ReadAhead, named, split_of

if __name__ == "__main__":
    split = split_of(2)
    ahead = ReadAhead(split, split.workers, named, pinned=False)
    ahead._begin(0) if sys.argv[1] == "early" else ahead.get(0)
    print(*(each.pid for each in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else os._exit(3)
"""


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script outside the checkout, which imports its tests, and which its workers may outlive."""
    checkout = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": checkout}
    out, err = path.with_suffix(".out"), path.with_suffix(".err")
    with out.open("w") as stdout, err.open("w") as stderr:
        command = [sys.executable, path, *arguments]
        ran = subprocess.run(command, env=environment, stdout=stdout, stderr=stderr, timeout=300, check=False)
    return subprocess.CompletedProcess(ran.args, ran.returncode, out.read_text(), err.read_text())


def _lives(pid: int) -> bool:
    """Whether the process is there, and not only its exit status, for which nobody has asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("exit", marks=pytest.mark.rare), "kill", "early"])
def test_workers_end_with_the_rank_however_that_ends(how: str, tmp_path: Path) -> None:
    """As ranks of a failed job do: nobody has told the workers, which may still be importing."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = run_script(tmp_path / "script.py", how)
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) == 2, ran.stderr
    until_s = time.monotonic() + 150
    while left := [pid for pid in pids if _lives(pid)]:
        states = [Path(f"/proc/{pid}/status").read_text() for pid in left] if time.monotonic() > until_s else []
        assert not states, f"workers are left:\n{states}\n{(tmp_path / 'script.err').read_text()}"
        time.sleep(0.05)


UNGUARDED = """
import mpisgd
from tests.unit.data.test_loader import ReadAhead, named, split_of

if __name__ != "__main__":  # in the worker; the rank is no job here
    mpisgd.train()
split = split_of(1)
ReadAhead(split, split.workers, named, pinned=False).get(0)
"""


@pytest.mark.slow
def test_a_script_that_trains_as_it_is_imported_is_told_where_to_put_it(tmp_path: Path) -> None:
    """A worker imports the script, too: it must neither train nor begin MPI."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    ran = run_script(tmp_path / "script.py")
    assert ran.returncode == 1
    why = "is called as a worker process imports the script: put the call below `if __name__"
    assert f"ConfigError: mpisgd.train() {why}" in ran.stderr
    assert "exited unexpectedly" in ran.stderr


def test_of_a_loader_its_data_collate_function_and_workers_are_taken() -> None:
    made = DataLoader(Crops(), batch_size=4, shuffle=True, num_workers=3, prefetch_factor=5, collate_fn=padded, timeout=9)  # type: ignore[arg-type]
    split = as_dataset((made, None)).train
    assert isinstance(split, CollatedSplit)
    assert split.workers == Workers(3, 5, "spawn", None, 9)
    assert split.batch_size == 4
    assert split.input_shape == (4,)
    pairs = as_dataset((DataLoader([(torch.ones(2), 1)] * 5), None)).train  # type: ignore[arg-type]
    assert type(pairs) is LazySplit, "pairs for a loss are stacked as those of a Dataset are"
    assert pairs.workers is None


class Shared:
    """Samples in memory that processes share, with a lock that can be given to new processes alone."""

    def __init__(self) -> None:
        self.x = torch.ones(20, 3).share_memory_()
        self.lock = multiprocessing.get_context("spawn").Lock()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], 0


LOADERS: dict[str, tuple[Any, str]] = {
    "sampler": (
        lambda: DataLoader(Crops(), sampler=WeightedRandomSampler([1.0] * 32, 32)),  # type: ignore[arg-type]
        r"a sampler of your own, or none \(WeightedRandomSampler\)",
    ),
    "no batches": (lambda: DataLoader(Crops(), batch_size=None), "a sampler of your own, or none"),  # type: ignore[arg-type]
    "fork": (
        lambda: DataLoader(Crops(), num_workers=1, multiprocessing_context="fork"),  # type: ignore[arg-type]
        "forks workers, expected 'spawn' or 'forkserver'",
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_cannot_be_taken_from_a_loader_is_refused(name: str) -> None:
    make, message = LOADERS[name]
    with pytest.raises(ConfigError, match=f"mine: .*{message}"):
        workers_of(make(), "mine")


def test_the_size_of_its_batches_is_mu() -> None:
    x = torch.ones(20, 3)
    samples = DataLoader(list(zip(x, x, strict=True)), batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data: train: the DataLoader has batch_size = 8, but mu = 16: expected the same"):
        parts.load_data(Config(mu=16), UserObjects(data=(samples, None)))
    assert len(parts.load_data(Config(mu=8), UserObjects(data=(samples, None))).train) == 20


def test_what_workers_cannot_be_given_is_refused_before_the_start() -> None:
    check_workers(split_of(2))
    shared = Shared()
    check_workers(as_dataset((DataLoader(shared, num_workers=1), None)).train)  # type: ignore[arg-type]
    assert not [each for each in threading.enumerate() if "_serve" in each.name], "nobody offers its tensors"
    split = as_dataset((DataLoader(Crops(), collate_fn=lambda samples: samples[0], num_workers=1), None), nested=True).train  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"num_workers = 1, but the data set cannot be given to workers: .*lambda"):
        check_workers(split)
