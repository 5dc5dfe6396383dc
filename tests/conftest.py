"""A place for what launchers keep: Open MPI's leave it behind where they are killed, and that of a killed one with the same process
number keeps a new one from starting ("The PMIx server's listener thread failed to start"). And which tests are the rest."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from mpisgd.base import storage
from tests.effort import REST


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """MPISGD_TESTS=rest: without what `make test` has run just so."""
    if not REST:
        return
    run = {item for item in items if any(item.get_closest_marker(name) for name in ("slow", "alone", "deeper"))}
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that the imports have made: it would look through these objects in each test again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Leave with pytest's own status, though tests of a full disk have had the process promise to fail."""
    atexit.unregister(storage._leave)


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
