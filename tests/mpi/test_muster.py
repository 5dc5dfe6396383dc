"""A rank that does not come to `mpisgd.train` is named: at once where its program has ended, else after some seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import mpirun

from .conftest import launch

SCRIPT = """
import sys, time
import mpisgd
from mpi4py import MPI
from mpisgd.liveness import muster
muster.PATIENCE_S = 1.0
if MPI.COMM_WORLD.rank in {here}:
    mpisgd.train(config={{"epochs": 0.1, "out": "run", "log": {{"progress": "off"}}}})
time.sleep({stays_s})
"""


EARLY = """
import os, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) != "0":
    sys.exit(0)
import mpisgd
from mpisgd.comm.mpi import library
"""


@pytest.mark.skipif(not Path(mpirun(1)[0]).with_name("prterun").exists(), reason="of Open MPI's launcher alone")
@pytest.mark.slow
def test_ranks_that_end_before_mpi_starts_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EARLY)
    done = launch(3, "script.py", timeout_s=60, cwd=tmp_path)
    assert done.status != 0
    assert re.search("while MPI was starting: 2 ranks, before any other looked; the job is ended", done.text), done.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "stays_s", "told"),
    [
        ({0}, 0, "rank 1(-2)? ended without mpisgd.train|rank 2 ended without"),
        ({1, 2}, 0, "rank 0 ended without mpisgd.train"),
        ({0, 2}, 12, "waiting for rank 1 to call mpisgd.train"),
    ],
    ids=str,
)
def test_who_is_missing_is_said(here: set[int], stays_s: float, told: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(here=here, stays_s=stays_s))
    done = launch(3, "script.py", timeout_s=60, cwd=tmp_path)
    assert done.status != 0
    assert re.search(told, done.text), done.text
    assert "every rank of the job calls it" in done.text
