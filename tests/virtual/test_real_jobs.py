"""The three real jobs of results/: scripts of at most 60 lines, which train, and are replayed, in small; and the kept runs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from mpisgd import replay
from mpisgd.base.errors import DataError
from mpisgd.data import cifar10
from mpisgd.data.dataset import DataSet, Split, make_dataset
from tests.effort import thinned

RESULTS = Path(__file__).parents[2] / "results"
SCRIPTS = sorted((RESULTS / "jobs").glob("*.py"))

sys.path += [str(RESULTS), str(RESULTS / "jobs")]

import real_jobs  # noqa: E402 - scripts, which import their neighbours as they do when they are run
import transformer  # noqa: E402

TASKS = {task.name: task for task in real_jobs.TASKS}
RUNS = [(name, way) for name, task in TASKS.items() for way in task.ways]
ONE_UPDATE: dict[str, dict[str, Any]] = {
    "resnet20": {"epochs": 0.25, "kwargs": {"samples": 64}},
    "transformer": {"epochs": 0.25},
    "finetune": {"epochs": 0.25, "kwargs": {"samples": 64, "test_samples": 8}},
}
"""Two mini-batches of two samples of each learner, or more."""


def tiny(name: str) -> Any:
    more = {"mu": 2, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}
    return replace(TASKS[name], more=more, **ONE_UPDATE[name])


def pictures(*shape: int) -> DataSet:
    """Pictures of noise, as those of the papers come."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(256, (72, *shape), generator=generator, dtype=torch.uint8)
    train, test = (Split(inputs[part], torch.arange(72)[part] % 10, scale=255.0) for part in (slice(64), slice(64, None)))
    return make_dataset("noise", train, test, DataError, subtract=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of CIFAR-10, which need not be there; the first windows of the text."""
    monkeypatch.setattr(cifar10, "load", lambda *_, **__: pictures(3, 32, 32))
    windows = transformer.make_data()
    monkeypatch.setattr(transformer, "make_data", lambda: [Subset(part, range(64)) for part in windows])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60


def test_every_script_is_a_task() -> None:
    assert [path.stem for path in SCRIPTS] == sorted(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), thinned(RUNS, 9))
def test_a_job_trains_and_is_replayed(name: str, way: str, runs: Path) -> None:
    before = TASKS[name].after
    if before and not (runs / f"{before}-hardsync").exists():
        real_jobs.trained(tiny(before), "hardsync", runs)
    found = real_jobs.trained(tiny(name), way, runs)
    assert found["updates"] >= 1
    assert found["rows"][-1][2] >= 2 * 4 * found["parameters"] * 4, "each of four learners has pushed and pulled"
    proof = replay.replay(runs / f"{name}-{way}", trust=True)
    assert proof.holds, proof.reason


# --------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_a_kept_run_is_of_the_settings_that_the_script_has(name: str, way: str) -> None:
    found = real_jobs.kept(RESULTS / "real-jobs" / f"{name}-{way}.json", TASKS[name], way)
    assert found is not None, "python results/real_jobs.py"
    assert re.fullmatch("[0-9a-f]{7,}", found["git_commit"]), "of a state that there is, without edits"
    assert len(found["rows"][0]) == len(found["columns"])
    assert found["rows"][-1][0] >= TASKS[name].epochs


@pytest.mark.parametrize("name", TASKS)
def test_the_page_has_the_table_of_the_kept_runs(name: str) -> None:
    files = {way: RESULTS / "real-jobs" / f"{name}-{way}.json" for way in TASKS[name].ways}
    tables, _ = real_jobs.shown(TASKS[name], {way: json.loads(path.read_text()) for way, path in files.items()})
    page = re.sub(" +", " ", (RESULTS / "README.md").read_text())
    for table in tables:
        for line in table.markdown().splitlines():
            if line.startswith("| ") and "---" not in line:
                assert re.sub(" +", " ", line) in page
