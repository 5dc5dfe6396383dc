"""Runs of which each has events and entries that no other has, also as if they had been of real ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mpisgd.exchange import ways
from mpisgd.replay.checks.record import read
from mpisgd.replay.prove import check_log
from tests.unit.replay.claims.hands import environment
from tests.unit.replay.test_replay import simulated

LEARNERS = 4
SOFTSYNC = {"name": "softsync", "n": 2}
LATE = {"delay": "exponential", "delay_mean_s": 0.05, "slowdown": {"1": 1.5}}
EVALUATED = {"every_epochs": 0.03, "train": True}
#: What each run is for: the events and entries that no other has.
RUNS: dict[str, dict[str, Any]] = {
    "all": {"protocol": SOFTSYNC, "shards": 2, "averaging": 0.9, "straggler": LATE,
            "evaluation": {**EVALUATED, "best": "error"}, "evaluator": True},
    "bfloat16": {"protocol": SOFTSYNC, "push_format": "bfloat16", "pull_format": "bfloat16"},
    "topk": {"protocol": SOFTSYNC, "push_format": "topk", "topk_share": 0.2},
    "norms": {"protocol": SOFTSYNC, "model": {"name": "mlp", "hidden": [12], "batch_norm": True}, "evaluation": EVALUATED},
    "nonfinite": {"protocol": SOFTSYNC, "nonfinite": "continue", "alpha0": 1e30},
    "leaving": {"protocol": SOFTSYNC, "failures": {"at_s": {"1": 0.25}}},
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.09}},
    "giving-up": {"protocol": {"name": "backup", "b": 2, "abort": True}, "straggler": LATE},
    "layers": {"protocol": SOFTSYNC, "shards": 2, "per_layer": True, "straggler": LATE},
    "teams": {
        "protocol": "hardsync", "aggregation": "node", "team_size": 2, "virtual": {"learners": LEARNERS, "ranks_per_node": 9},
        "straggler": LATE,
    },
    "slices": {"protocol": "hardsync", "shards": 6, "virtual": {"learners": LEARNERS, "ranks_per_node": 2, "spare_nodes": 2}},
    "groups": {"protocol": SOFTSYNC, "group_size": 2, "shards": 2, "micro_batches": 2, "mu": 4, "straggler": LATE},
}  # fmt: skip


Runs = Callable[..., Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Make a run where a test first asks for it, as it is and as if it had been one of real ranks; its log is as it must be."""
    directory = tmp_path_factory.mktemp("claims")

    @cache
    def made(name: str) -> Path:
        virtual, real = directory / name / "virtual", directory / name / "real"
        with mock.patch.object(ways, "LEAST_NBYTES", 40 if name == "slices" else ways.LEAST_NBYTES):
            simulated(virtual, learners=LEARNERS, epochs=0.1, **RUNS[name])
        shutil.copytree(virtual, real)
        environment(real, virtual=False, cores_per_node=[2], cores=["0", "1"])
        check_log(read(real))
        return directory / name

    return lambda name, *, real: made(name) / ("real" if real else "virtual")


@pytest.fixture
def run_of(runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run, to be tampered with."""

    def copy(name: str, *, real: bool) -> Path:
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        return shutil.copytree(runs(name, real=real), path)

    return copy
