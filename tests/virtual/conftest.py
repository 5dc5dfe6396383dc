"""Virtual jobs in directories that are thrown away: nothing is synced, and git not asked; both take longer than most jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpisgd.base import durable
from mpisgd.base.git import Commit
from mpisgd.job import provenance
from mpisgd.liveness import guard


@pytest.fixture(autouse=True, scope="module")  # no longer: the tests of other folders run in the same process
def thrown_away() -> Iterator[None]:
    nothing = Commit("", dirty=False)
    with durable.thrown_away(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit_of", lambda *_: nothing)
        patch.setattr(provenance, "commit_of_package", lambda *_: nothing)
        yield


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run inside a batch job."""
    for name in (*guard.SIZE_VARIABLES, *guard.RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
