"""Sandblaster L-BFGS on real ranks: books that balance, each portion counted once, and a log that proves its run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED, EXIT_OK
from mpisgd.comm.mpi.launch import mpirun
from mpisgd.config import config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Outcome
from mpisgd.simulate.job import simulate

from .conftest import Shared, dealt, jobs_of, only
from .test_signals import ranks_of, updates, wait_for

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "arrival-6-evaluator": (
        6,
        {"shards": 2, "evaluator": True, "mu": 64, "protocol": {"name": "sandblaster", "iterations": 4, "push_every": 2}},
    ),
    "portions-5": (
        5,
        {
            "mu": 100,
            "straggler": {"slowdown": {1: 3.0}},
            "protocol": {"name": "sandblaster", "iterations": 4, "order": "portions", "weight_decay": 0.01},
        },
    ),
    # Weights are sent in chunks.
    "large-5-spread": (
        5,
        {
            "shards": 2,
            "placement": "spread",
            "mu": 480,
            "model": {"name": "mlp", "hidden": [1200, 1200]},
            "protocol": {"name": "sandblaster", "iterations": 2, "history": 2},
        },
    ),
}
COMMON = {"log": {"progress": "off"}, "evaluation": {"every_epochs": 0}}
CASES = dealt(RUNS, always=list(RUNS)[:1])
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.parametrize(("switch", "name"), CASES)
def test_books_balance_and_replay_proves_the_run(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    assert all(books.balanced for books in run.books())
    portions, iterations = run.of_coordinator("portions"), run.of_coordinator("iterations")
    counted = portions[portions["outcome"] == Outcome.COUNTED]
    each = -(-1437 // run.config["mu"])
    assert len(counted) == each * iterations["clock"][-1]
    assert len(set(counted[["clock", "portion"]].tolist())) == len(counted)
    assert iterations["loss"][-1] < iterations["loss"][0]
    assert run.done is not None
    proof = replay.replay(run.path, trust=True)
    assert proof.reason == ""
    assert [found.elements for found in proof.differences] == [0]


@pytest.mark.parametrize(("switch", "name"), only(CASES, "arrival"))
def test_pushes_are_sums_of_several_portions(runs: Path, switch: str, name: str) -> None:
    pushes = Run(runs / switch / name).pushes
    assert set(pushes["gradients"].tolist()) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_signal_saves_the_history_and_the_run_goes_on(shards: int, tmp_path: Path) -> None:
    """With as many shards to the bits of a run that was never stopped, which virtual ranks have made; else within rounding."""
    job = {
        "protocol": {"name": "sandblaster", "iterations": 8, "order": "portions"},
        "model": "softmax",
        "mu": 200,
        "threads": 1,
        **COMMON,
    }
    whole = {**job, "out": str(tmp_path / "whole"), "virtual": {"learners": 2, "gradients": True}}
    simulate(config_file.from_mapping(whole))
    table = {**job, "log": {"progress": "off", "flush_s": 0.0}, "out": str(tmp_path / "run")}
    straggler = {"delay": "constant", "delay_mean_s": 0.1}
    (tmp_path / "job.toml").write_text(config_file.dumps(config_file.from_mapping({**table, "straggler": straggler})))
    train = [sys.executable, "-m", "mpisgd", "train"]
    with ranks_of([*mpirun(4), *train, str(tmp_path / "job.toml")]) as process:
        wait_for(lambda: updates(tmp_path / "run", 0) > 4, process)
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED, said
    assert "checkpoint at clock" in said
    with ranks_of([*mpirun(3 + shards), *train, "--resume", str(tmp_path / "run"), "--shards", str(shards)]) as process:
        _, said = process.communicate(timeout=100)
    assert process.returncode == EXIT_OK, said
    run, other = Run(tmp_path / "run"), Run(tmp_path / "whole")
    mine, theirs = run.of_coordinator("iterations"), other.of_coordinator("iterations")
    assert run.attempt == 1
    if shards == 1:
        assert mine["loss"].tolist() == theirs["loss"].tolist()
        mine, theirs = (torch.load(each.path / schema.WEIGHTS, weights_only=True)["theta"] for each in (run, other))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    else:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    proof = replay.replay(run.path, trust=True)
    assert proof.holds, proof.reason
    assert proof.differences
