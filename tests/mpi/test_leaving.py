"""What all ranks refuse alike: one tells, one says the status, and none holds up the others (`liveness/leaving.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment, mpirun

from .conftest import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-m mpisgd train --mu 0", "mpisgd train: ConfigError: mu = 0"),
        ("-c 'import mpisgd; mpisgd.train(config=dict(mu=0))'", "ConfigError: mu = 0"),
        ("-c 'import mpisgd; mpisgd.train(config=dict(shards=3))'", "AgreedError: ConfigError: too few ranks: found 3"),
    ],
    ids=["command", "before MPI", "agreed"],
)
def test_of_ranks_that_leave_together_the_first_says_the_status_for_all(words: str, told: str, tmp_path: Path) -> None:
    """Where several ranks end with one that is not 0, Open MPI's launcher may never end.

    The first one's shell waits for the others': a launcher ends those whom it finds alive after a status that is not 0.
    """
    rank = "${OMPI_COMM_WORLD_RANK-$PMI_RANK}"
    last = f'while [ {rank} = 0 ] && [ ! -s "{tmp_path}/1" -o ! -s "{tmp_path}/2" ]; do sleep 0.1; done'
    script = f'"{sys.executable}" {words}; status=$?; echo $status >"{tmp_path}/{rank}"; {last}; exit $status'
    done = subprocess.run(
        [*mpirun(3), "sh", "-c", script], env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 2, done.stderr
    assert [(tmp_path / str(each)).read_text().strip() for each in range(3)] == ["2", "0", "0"]
    assert done.stderr.count(told) == 1


NEVER_ENDS = """
import atexit, time, mpisgd
from mpisgd.liveness import leaving
from mpisgd.comm.mpi.library import MPI
leaving.END_S = 3
if MPI.COMM_WORLD.rank == 1:
    atexit.register(time.sleep, 10_000)
mpisgd.train(config={"shards": 3})
"""


def test_what_a_script_does_at_its_end_does_not_hold_up_a_job_that_was_refused(tmp_path: Path) -> None:
    """In MPI_Finalize all wait for all."""
    done = launch(3, "-c", NEVER_ENDS, timeout_s=60, cwd=tmp_path)
    assert done.status != 0 and "too few ranks: found 3" in done.text
