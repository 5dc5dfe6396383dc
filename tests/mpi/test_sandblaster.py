"""Sandblaster L-BFGS on real ranks: books that balance, each portion counted once, and a log that proves its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Outcome

from .conftest import Shared, dealt, jobs_of, only

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
