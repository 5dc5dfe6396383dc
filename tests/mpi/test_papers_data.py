"""The papers' networks on the real data, in their authors' files; skipped where the files are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.records.log.reader import Run
from tests.staged import staged

from .conftest import launch

pytestmark = pytest.mark.slow

LAST = ("--evaluation.every-epochs", "0")
"""Only the last weights are evaluated: on 10,000 samples each."""


def train(tmp_path: Path, data_dir: str, *words: str) -> Run:
    done = launch(3, "-m", "mpisgd", "train", "--data-dir", data_dir, *LAST, *words, cwd=tmp_path, timeout_s=200)
    assert done.status == 0, done.text
    return Run(tmp_path / "results" / "run")


def test_mnist_with_chens_cnn(tmp_path: Path) -> None:
    run = train(
        tmp_path, staged("mnist"), "--data", "mnist", "--model", "mnist_cnn", "--mu", "32", "--epochs", "0.15", "--alpha0", "0.05"
    )
    assert run.environment["train_samples"] == 60_000
    assert run.evaluations["error"][-1] < 0.15


def test_cifar10_with_zhangs_network(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        staged("cifar10"),
        "--data",
        "cifar10",
        "--model",
        "cifar10_full",
        "--mu",
        "32",
        "--epochs",
        "0.3",
        "--alpha0",
        "0.01",
    )
    assert run.environment["parameters"] == 89_578
    assert run.environment["train_samples"] == 50_000
    assert run.evaluations["error"][-1] < 0.75
