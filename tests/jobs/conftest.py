"""Which MPI the tests of the batch scripts have."""

from __future__ import annotations

import subprocess

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import mpirun
from tests.jobs.faked import submit  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def mpi() -> str:
    """openmpi or mpich, as the scripts call it."""
    try:
        launcher = mpirun(1)[0]
    except ConfigError as error:
        pytest.skip(str(error))
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    return "openmpi" if "Open MPI" in told else "mpich"
