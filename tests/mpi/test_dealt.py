"""Real ranks whose data shard 0 deals: every portion is applied once, and replay comes to the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from .conftest import execute

COMMON = (
    *("train", "--sampling", "dealt", "--data", "synthetic", "--data.samples", "120", "--data.classes", "3"),
    *("--mu", "4", "--epochs", "2", "--alpha0", "0.002", "--threads", "1", "--log.progress", "off", "--model.hidden", "8"),
)


def test_versioned_and_softsync_on_real_ranks(tmp_path: Path) -> None:
    """60 portions; two shards and three learners."""
    jobs = [(5, tmp_path, (*COMMON, "--shards", "2", "--protocol", name, "--out", name)) for name in ("versioned", "softsync")]
    for done, (_, _, words) in zip(execute(tmp_path, jobs, ranks=5), jobs, strict=True):
        assert done.status == 0, done.text
        run = Run(tmp_path / words[-1])
        rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["verdict"] == Verdict.APPLY)]
        assert np.bincount(rows["portion"]).tolist() == [1] * 60
        proof = replay.replay(run.path)
        assert proof.lines()[-1].startswith("identical"), proof.lines()
