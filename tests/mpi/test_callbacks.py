"""Callbacks of real ranks: which rank calls which, of what; and one that raises ends the job, named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpisgd.records.log.reader import Run

from .conftest import launch

SCRIPT = """
import dataclasses, json, os, sys
from pathlib import Path
from mpi4py import MPI
import mpisgd

FAILS = ""

def told(name):
    def tell(record):
        if name == FAILS:
            raise ValueError("no disk")
        line = {"rank": MPI.COMM_WORLD.Get_rank(), **dataclasses.asdict(record)}
        with Path(name).open("a") as file:
            file.write(json.dumps(line, default=str) + "\\n")
    return tell

mpisgd.train(
    config={
        "epochs": 2, "mu": 4, "evaluator": True, "threads": 1, "out": "run", "log": {"progress": "off"},
        "data": {"name": "synthetic", "samples": 120, "classes": 3}, "model": {"name": "mlp", "hidden": [8]},
        "evaluation": {"every_epochs": 0.5},
    },
    **{name: told(name) for name in ("on_update", "on_evaluation", "on_end")},
)
"""
FUNCTIONS, JOB = SCRIPT.split("mpisgd.train(")
CLASS = """
class Told:
    on_update, on_evaluation, on_end = (staticmethod(told(name)) for name in ("on_update", "on_evaluation", "on_end"))
"""


@pytest.mark.slow
def test_who_is_told_of_what(tmp_path: Path) -> None:
    """A shard, a learner, an evaluator; the functions are methods of a class that the configuration names."""
    (tmp_path / "named.py").write_text(FUNCTIONS + CLASS)
    job = JOB.partition("    **{")[0].replace('"epochs"', '"callbacks": "named:Told", "epochs"')
    (tmp_path / "mine.py").write_text(f"import mpisgd\nmpisgd.train({job})")
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.text
    updates, evaluations, ends = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("on_update", "on_evaluation", "on_end")
    )
    run = Run(tmp_path / "run")
    assert run.done is not None
    (clock,) = run.done["clock"]
    assert {each["rank"] for each in updates} == {0}
    assert sum(each["updates"] for each in updates) == updates[-1]["clock"] == clock
    assert {each["rank"] for each in evaluations} == {run.environment["evaluator_rank"]} != {0}
    assert [each["loss"] for each in evaluations] == run.evaluations["loss"].tolist()
    assert [each["last"] for each in evaluations] == [False] * (len(evaluations) - 1) + [True]
    (end,) = ends
    assert (end["rank"], end["clocks"], end["path"], end["diverged"]) == (0, [clock], "run", False)


@pytest.mark.slow
def test_one_that_raises_ends_the_job_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace('FAILS = ""', 'FAILS = "on_evaluation"'))
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status != 0
    assert "RuntimeError: the callback on_evaluation failed: ValueError: no disk" in done.text
    assert "(evaluator) on " in done.text
