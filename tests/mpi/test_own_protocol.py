"""A protocol from outside the package, on real ranks: trained, resumed by name in its config.toml, and replayed."""

from __future__ import annotations

from pathlib import Path

from mpisgd.records.log.reader import Run
from tests import majority

from .conftest import launch

SIZES = ("--mu", "8", "--epochs", "2", "--threads", "1", "--log.progress", "off", "--evaluation.every-epochs", "0")


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
