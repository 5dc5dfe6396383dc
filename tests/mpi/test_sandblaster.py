"""Sandblaster L-BFGS on real ranks: books that balance, each portion counted once, and a log that proves its run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED, EXIT_OK
from mpisgd.config import config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Outcome
from mpisgd.simulate.job import simulate
from tests.faults.job import Job

from .conftest import Shared, dealt, jobs_of, only
from .test_signals import updates
from .test_tolerant import END_S, release_stopped, started, users_module

__all__ = ["started", "users_module"]

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


@pytest.mark.deeper
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


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "arrival"))
def test_pushes_are_sums_of_several_portions(runs: Path, switch: str, name: str) -> None:
    pushes = Run(runs / switch / name).pushes
    assert set(pushes["gradients"].tolist()) == {1, 2}


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.rare)])
def test_a_signal_saves_the_history_and_the_run_goes_on(shards: int, started: list[Job], tmp_path: Path) -> None:
    """With as many shards to the bits of a run that was never stopped, which virtual ranks have made; else within rounding."""
    job = {
        "protocol": {"name": "sandblaster", "iterations": 8, "order": "portions"},
        "model": "softmax",
        "loss": "user:loss",
        "mu": 200,
        "threads": 1,
        **COMMON,
    }
    whole = {**job, "out": str(tmp_path / "whole"), "virtual": {"learners": 2, "gradients": True}}
    release_stopped(tmp_path, "twice", "once")
    simulate(config_file.from_mapping(whole))
    (tmp_path / "once").unlink()
    table = {**job, "log": {"progress": "off", "flush_s": 0.0}, "out": str(tmp_path / "run")}
    (tmp_path / "job.toml").write_text(config_file.dumps(config_file.from_mapping(table)))
    begun = Job(4, [str(tmp_path / "job.toml")], ONCE="24")  # six of the nine evaluations and more that it takes
    started.append(begun)
    begun.until(lambda: updates(tmp_path / "run", 0) > 2)
    for rank in range(4):
        begun.send(rank, signal.SIGUSR1)
    release_stopped(tmp_path, "once")
    assert begun.end(END_S) == EXIT_INTERRUPTED, begun.text
    assert "checkpoint at clock" in begun.text
    resumed = Job(3 + shards, ["--resume", str(tmp_path / "run"), "--trust", "--shards", str(shards)])
    started.append(resumed)
    assert resumed.end(END_S) == EXIT_OK, resumed.text
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
