"""Runs to be tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.replay.test_replay import UNEVEN, simulated

Rows = np.ndarray
SOFTSYNC = {"name": "softsync", "n": 2}
#: Six learners and c = 3, so that each update sums gradients of different staleness; two samples make the losses uneven.
RUNS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": SOFTSYNC, "averaging": 0.9, "schedule": "linear"},
    "softsync-S2": {"protocol": SOFTSYNC, "shards": 2},
    "hardsync": {"protocol": "hardsync"},
    "backup-S2": {"protocol": {"name": "backup", "b": 2}, "shards": 2},
    "timeout-S2": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.09}, "shards": 2},
    "versioned-S2": {"protocol": {"name": "versioned", "grads_to_wait": 3}, "shards": 2},
    "ssp": {"protocol": {"name": "ssp", "slack": 1, "modulation": "inverse_plus_one"}},
    "teams-S2": {
        "protocol": {"name": "backup", "b": 1},
        "shards": 2,
        "aggregation": "node",
        "team_size": 3,
        "virtual": {"learners": 7, "ranks_per_node": 100},
    },
    "leaving": {"protocol": SOFTSYNC, "failures": {"at_s": {"1": 0.25}}},
    "giving-up-S2": {"protocol": {"name": "backup", "b": 1, "abort": True}, "shards": 2},
    "layers-S2": {"protocol": "async", "per_layer": True, "shards": 2},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a run where a test first asks for it; its log is as it must be."""
    directory = tmp_path_factory.mktemp("tampered")

    @cache
    def made(name: str) -> Path:
        path = simulated(directory / name, learners=6, epochs=0.12, mu=2, compute=UNEVEN, alpha0=0.1, **RUNS[name])
        return path

    return made


@pytest.fixture
def run(runs: Callable[[str], Path], tmp_path: Path) -> Path:
    """The softsync run with one shard, to be tampered with."""
    return shutil.copytree(runs("softsync"), tmp_path / "run")


@pytest.fixture
def sharded(runs: Callable[[str], Path], tmp_path: Path) -> Path:
    """The softsync run with two shards."""
    return shutil.copytree(runs("softsync-S2"), tmp_path / "sharded")
