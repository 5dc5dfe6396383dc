"""For all of these tests: git is asked once about a directory, the digits are read and templates compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from mpisgd.base.git import Commit, commit_of, commit_of_package
from mpisgd.data import digits
from mpisgd.job import provenance
from mpisgd.site.scripts import render


@pytest.fixture(autouse=True, scope="session")
def _once() -> Iterator[None]:
    once = cache(commit_of)

    def of(directory: Path, files: Sequence[Path] = ()) -> Commit:
        return once(directory, tuple(files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit_of", of)
        patch.setattr(provenance, "commit_of_package", cache(commit_of_package))
        patch.setattr(digits, "_read", cache(digits._read))
        patch.setattr(render, "_environment", cache(render._environment))
        yield


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be made and their files be empty: to draw them takes longer than all else of a report."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
