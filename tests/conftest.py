"""A place for what launchers keep: Open MPI's leave it behind where they are killed, and that of a killed one with the same process
number keeps a new one from starting ("The PMIx server's listener thread failed to start")."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """For launches that tests share."""
    os.environ["TMPDIR"] = directory = tempfile.mkdtemp(prefix="mpisgd-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def tmpdir_of_launchers() -> Iterator[None]:
    """For those of one test."""
    before = os.environ["TMPDIR"]
    os.environ["TMPDIR"] = directory = tempfile.mkdtemp(dir=before)
    yield
    os.environ["TMPDIR"] = before
    shutil.rmtree(directory, ignore_errors=True)
