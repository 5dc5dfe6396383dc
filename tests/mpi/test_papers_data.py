"""The papers' networks on the real data, in their authors' files; skipped where the files are absent."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mpisgd import replay
from mpisgd.analysis.training import Target
from mpisgd.config import Part
from mpisgd.records.log.reader import Run
from mpisgd.report.compare import compare
from tests.staged import staged

from .conftest import launch

pytestmark = pytest.mark.slow

LAST = ("--evaluation.every-epochs", "0")
"""Only the last weights are evaluated: on 10,000 samples each."""

CHANCE = 0.9
"""The error of a guess among ten classes. An asynchronous run's error differs with its schedule: half of it is far from both."""


def train(tmp_path: Path, data_dir: str, *words: str) -> Run:
    done = launch(3, "-m", "mpisgd", "train", "--data-dir", data_dir, *LAST, *words, cwd=tmp_path, timeout_s=200)
    assert done.status == 0, done.text
    return Run(tmp_path / "results" / "run")


def test_mnist_with_chens_cnn(tmp_path: Path) -> None:
    run = train(
        tmp_path, staged("mnist"), "--data", "mnist", "--model", "mnist_cnn", "--mu", "32", "--epochs", "0.15", "--alpha0", "0.05"
    )
    assert run.environment["train_samples"] == 60_000
    assert run.evaluations["error"][-1] < CHANCE / 2


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
    assert run.evaluations["error"][-1] < CHANCE - 0.15


def test_zhangs_job_on_real_ranks_comes_to_a_target_and_is_proved(tmp_path: Path) -> None:
    """The job file itself, in Caffe's form, with samples set aside; and what `compare` tells of the way there."""
    data_dir, job = staged("cifar10"), str(Path(__file__).parents[2] / "jobs" / "zhang16-cifar10.toml")
    words = ("--data-dir", data_dir, "--epochs", "0.02", "--evaluation.every-epochs", "0", "--threads", "1")
    aside = ("--data.validation", "5000", "--evaluation.best", "validation_error", "--out", "run")
    done = launch(4, "-m", "mpisgd", "train", job, *words, *aside, cwd=tmp_path, timeout_s=200)
    assert done.status == 0, done.text
    run = Run(tmp_path / "run")
    assert run.environment["train_samples"] == 45_000
    assert run.evaluations["train"].tolist() == [Part.TEST, Part.VALIDATION] * 2
    assert run.evaluations["loss"][2] < run.evaluations["loss"][0], "it learns"
    found = compare([run.path], tmp_path / "out", Console(file=io.StringIO()), target=Target("error", 0.89))
    assert (tmp_path / "out" / "target.csv").read_text().splitlines()[1].startswith("run,theta,1 of 1,")
    assert found.table.cells("run") == ["run"]
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
