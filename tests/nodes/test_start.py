"""A job of several nodes whose link fails before training ends, whatever its ranks wait for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

pytestmark = pytest.mark.slow

SCRIPT = """
import time
from pathlib import Path
import mpisgd
from mpi4py import MPI
Path(f"here-{MPI.COMM_WORLD.rank}").touch()
while not Path("cut").exists():
    time.sleep(0.05)
mpisgd.train(config={"epochs": 0.1, "out": "run"})
"""


def test_a_link_that_fails_between_the_start_of_mpi_and_training(
    open_mpi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI connects at the first message, and waits for the other node for ever."""
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(SCRIPT)
    with Cluster(2) as cluster:
        job = Job(cluster, (1, 1), [], module="late", MPISGD_START_S="5")
        until_s = time.monotonic() + 60
        while len(list(tmp_path.glob("here-*"))) < 2:
            assert time.monotonic() < until_s and not job.over, job.text
            time.sleep(0.05)
        cluster.cut(1, "both")
        Path("cut").touch()
        status = job.end(60)
    assert status not in (0, None), job.text
    assert job.left_s is not None, f"{job.stayed} stayed\n{job.text}"
