"""Tests on a cluster in a box need root, and namespaces."""

from __future__ import annotations

import subprocess

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import mpirun
from tests.nodes.cluster import missing


@pytest.fixture(autouse=True, scope="session")
def _needs_namespaces() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture(scope="session")
def open_mpi() -> None:
    """The launcher whose ranks the cluster knows how to spread over nodes."""
    try:
        said = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=False).stdout
    except ConfigError as error:
        pytest.skip(str(error))
    if "Open MPI" not in said:
        pytest.skip("the cluster in a box launches ranks by Open MPI's mpirun alone")
