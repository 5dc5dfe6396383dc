"""The papers' networks on the real data, in their authors' files; skipped where the files are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpisgd.records.reader import Run

from .conftest import launch

DATA = Path(os.environ.get("MPISGD_DATA") or Path(__file__).parents[3] / "shared" / "data")


def train(tmp_path: Path, *words: str) -> Run:
    done = launch(3, "-m", "mpisgd", "train", "--data-dir", str(DATA), *words, cwd=tmp_path, timeout_s=200)
    assert done.status == 0, done.text
    return Run(tmp_path / "results" / "run")


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason=f"no MNIST below {DATA}; set MPISGD_DATA")
def test_mnist_with_chens_cnn(tmp_path: Path) -> None:
    run = train(tmp_path, "--data", "mnist", "--model", "mnist_cnn", "--mu", "32", "--epochs", "0.15", "--alpha0", "0.05")
    assert run.environment["train_samples"] == 60_000
    assert run.evaluations["error"][-1] < 0.15


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason=f"no CIFAR-10 below {DATA}; set MPISGD_DATA")
def test_cifar10_with_zhangs_network(tmp_path: Path) -> None:
    run = train(tmp_path, "--data", "cifar10", "--model", "cifar10_full", "--mu", "32", "--epochs", "0.4", "--alpha0", "0.01")
    assert run.environment["parameters"] == 89_578
    assert run.environment["train_samples"] == 50_000
    assert run.evaluations["error"][-1] < 0.75
