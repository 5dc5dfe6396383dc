"""Loggers of real ranks: a fake W&B is told by shard 0 and by the evaluator, and one that cannot be imported is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpisgd.records.log.reader import Run

from .conftest import launch

FAKE = """
import json
from pathlib import Path

Settings = dict

def init(**fields):
    return Fake(fields["name"])

class Fake:
    def __init__(self, name):
        self.file = Path(f"told-{name.replace(' ', '-')}").open("a")

    def define_metric(self, *names, **fields):
        pass

    def log(self, values):
        print(json.dumps(values), file=self.file, flush=True)

    def finish(self):
        print(json.dumps("finished"), file=self.file, flush=True)
"""
SCRIPT = """
import mpisgd

mpisgd.train(
    config={
        "epochs": 2, "mu": 4, "evaluator": True, "threads": 1, "out": "run", "log": {"progress": "off"}, "loggers": ["wandb"],
        "data": {"name": "synthetic", "samples": 120, "classes": 3}, "model": {"name": "mlp", "hidden": [8]},
        "evaluation": {"every_epochs": 0.5},
    },
)
"""


@pytest.mark.slow
def test_who_writes_what(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE)
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.text
    updates, evaluations = (
        [json.loads(line) for line in (tmp_path / f"told-run-{part}").read_text().splitlines()]
        for part in ("updates", "evaluations")
    )
    assert updates.pop() == evaluations.pop() == "finished"
    run = Run(tmp_path / "run")
    assert run.done is not None
    assert [updates[-1]["clock"]] == run.done["clock"]
    assert [each["test/loss"] for each in evaluations] == run.evaluations["loss"].tolist()
    assert [each["clock"] for each in evaluations] == run.evaluations["clock_max"].tolist()


@pytest.mark.slow
def test_one_that_cannot_be_imported_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    """By the ranks that would be told: shard 0 and the evaluator."""
    (tmp_path / "wandb.py").write_text("raise ImportError('broken')")
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status not in (0, None)
    assert "ConfigError: loggers: wandb cannot be imported: broken" in done.text
    assert not (tmp_path / "run").exists()
