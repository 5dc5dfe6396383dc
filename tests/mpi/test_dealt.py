"""Real ranks whose data shard 0 deals: every portion is applied once, and replay comes to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from .conftest import Shared, dealt, jobs_of

COMMON: dict[str, Any] = {
    "sampling": "dealt",
    "data": {"name": "synthetic", "samples": 120, "classes": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "mu": 4,
    "epochs": 2,
    "alpha0": 0.002,
    "threads": 1,
    "log": {"progress": "off"},
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {name: (5, {"shards": 2, "protocol": name}) for name in ("versioned", "softsync")}
CASES = dealt(RUNS, always=("versioned",))
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_each_portion_is_applied_once(switch: str, name: str, runs: Path) -> None:
    """60 portions; two shards and three learners."""
    run = Run(runs / switch / name)
    rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["verdict"] == Verdict.APPLY)]
    assert np.bincount(rows["portion"]).tolist() == [1] * 60
    proof = replay.replay(run.path)
    assert proof.lines()[-1].startswith("identical"), proof.lines()
