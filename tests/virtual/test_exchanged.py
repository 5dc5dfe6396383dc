"""Bytes that a log tells of, beside those that the virtual network carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis.throughput import exchanged_until
from mpisgd.comm.virtual.network import Network
from mpisgd.config.config_file import from_mapping
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate

JOBS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "two shards": {"protocol": {"name": "softsync"}, "shards": 2},
    "backup": {"protocol": {"name": "backup", "b": 1}},
    "downpour": {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}},
    "bfloat16": {"protocol": {"name": "hardsync"}, "push_format": "bfloat16", "pull_format": "bfloat16"},
    "layerwise": {"protocol": {"name": "softsync"}, "per_layer": True, "shards": 2},
    "allreduce": {"protocol": {"name": "allreduce"}, "shards": 3},
}


@pytest.mark.parametrize("name", JOBS)
def test_bytes_told_are_those_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    carried, transfer = [0], Network.transfer

    def counted(network: Network, source: int, to: int, nbytes: int, now_ns: int) -> int:
        carried[0] += nbytes if source != to else 0
        return transfer(network, source, to, nbytes, now_ns)

    monkeypatch.setattr(Network, "transfer", counted)
    job = {"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [1024]}, "mu": 16, "epochs": 0.4, "evaluator": False}
    virtual = {"learners": 3, "gradients": False, "train_samples": 1437}
    quiet = {"out": str(tmp_path / "run"), "log": {"progress": "off"}, "virtual": virtual}
    run = Run(simulate(from_mapping({**job, **JOBS[name], **quiet})).path)
    assert exchanged_until(run, float("inf")) == pytest.approx(carried[0], rel=0.02)
    halfway = float(np.median(run.updates["time_s"]))
    assert 0.3 * carried[0] < (exchanged_until(run, halfway) or 0) < 0.75 * carried[0]
