"""A protocol from outside the package, on real ranks: trained, gone on with after a kill, and replayed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpisgd.job.interruption import newest
from mpisgd.records.log.reader import Run
from tests import majority
from tests.faults.job import Job

from .conftest import launch

SIZES = ("--mu", "8", "--epochs", "2", "--threads", "1", "--log.progress", "off", "--evaluation.every-epochs", "0")


@pytest.mark.rare
@pytest.mark.slow
def test_majority_trains_and_is_replayed(tmp_path: Path) -> None:
    majority.written(tmp_path)
    words = ("-m", "mpisgd", "train", "--protocol", "majority:Majority", "--shards", "2", *SIZES, "--out", "run")
    done = launch(5, *words, cwd=tmp_path, MPISGD_SSEND="1")
    assert done.status == 0, done.text
    run = Run(tmp_path / "run")
    assert run.done is not None
    assert run.config["protocol"]["factory"] == "majority:Majority"
    assert set(run.updates["gradients"][:-4].tolist()) == {2}, "more than half of three"
    asked = launch(1, "-m", "mpisgd", "replay", "run", cwd=tmp_path)
    assert asked.status != 0
    assert "protocol.factory = 'majority:Majority'" in asked.text, "it is code that the run names"
    proof = launch(1, "-m", "mpisgd", "replay", "run", "--protocol", "majority:Majority", cwd=tmp_path)
    assert proof.status == 0, proof.text
    assert "proved" in proof.text
    assert run.environment["brought"]["protocol"]["file"] == str(tmp_path / "majority.py")


@pytest.mark.slow
def test_a_run_of_it_goes_on_where_it_is_named_again(tmp_path: Path) -> None:
    """All ranks are killed once there is a checkpoint; what the run names is code, which nobody runs unasked."""
    majority.written(tmp_path)
    out, options = tmp_path / "run", ("--shards", "2", *SIZES, "--checkpoint.every-updates", "20")
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    job = Job(5, ["--protocol", "majority:Majority", *options, "--epochs", "1000", "--out", str(out)], **path)
    until_s = time.monotonic() + 60
    while newest(out) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    job.end(0)
    begun_again = newest(out)
    assert begun_again is not None, job.text
    words = ("-m", "mpisgd", "train", "--resume", "run", "--epochs", str((begun_again + 50) * 16 / 1437), "--log.progress", "off")
    refused = launch(5, *words, cwd=tmp_path)
    assert refused.status == 2, refused.text
    assert "protocol.factory = 'majority:Majority'" in refused.text
    done = launch(5, *words, "--protocol", "majority:Majority", cwd=tmp_path, MPISGD_SSEND="1")
    assert done.status == 0, done.text
    run = Run(out)
    assert run.done is not None
    assert run.updates["clock"].max() > begun_again
    proof = launch(1, "-m", "mpisgd", "replay", "run", "--protocol", "majority:Majority", cwd=tmp_path)
    assert proof.status == 0, proof.text
