"""A rank that does not come to `mpisgd.train` is named: at once where its program has ended, else after some seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import mpirun

from .conftest import launch

SCRIPT = """
import time
from pathlib import Path
import mpisgd
from mpi4py import MPI
from mpisgd.liveness import muster
muster.PATIENCE_S = 1.0
warn = muster.warn
muster.warn = lambda text: (warn(text), Path("told").touch())
if MPI.COMM_WORLD.rank in {here}:
    mpisgd.train(config={{"epochs": 0.1, "out": "run", "log": {{"progress": "off"}}}})
while {stays} and not Path("told").exists():
    time.sleep(0.1)
"""


LATE = """
import time
import mpisgd
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(60)
mpisgd.train(config={"epochs": 0.1, "out": "run"})
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
    ours, launchers = (
        "while MPI was starting: 2 ranks, before any other looked; the job is ended",
        'did not call "init" before exiting',
    )
    assert ours in done.text or launchers in done.text, "where rank 0 has begun to wait before, Open MPI's launcher says so itself"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "stays", "told"),
    [
        ({0}, False, "rank 1(-2)? ended without mpisgd.train|rank 2 ended without"),
        ({1, 2}, False, "rank 0 ended without mpisgd.train"),
        ({0, 2}, True, "waiting for rank 1 to call mpisgd.train"),
    ],
    ids=str,
)
def test_who_is_missing_is_said(here: set[int], stays: bool, told: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(here=here, stays=stays))
    done = launch(3, "script.py", timeout_s=60, cwd=tmp_path)
    assert done.status != 0
    assert re.search(told, done.text), done.text
    assert "call train() on every rank of the job" in done.text


@pytest.mark.slow
def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """A rank behind a link that failed never comes, and its program never ends."""
    (tmp_path / "script.py").write_text(LATE)
    done = launch(3, "script.py", timeout_s=50, cwd=tmp_path, MPISGD_START_S="5")
    assert done.status != 0
    assert "rank 1 has not called mpisgd.train() within 5 s: a node is unreachable, or MPISGD_START_S too short" in done.text
