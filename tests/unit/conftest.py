"""For all of these tests: git is asked once about a directory, the digits are read and templates compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mpisgd.site.scripts import render
from tests.once import once


@pytest.fixture(autouse=True, scope="session")
def _once() -> Iterator[None]:
    with once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "_environment", cache(render._environment))
        yield


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be made and their files be empty: to draw them takes longer than all else of a report."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
