"""The end of a process whose job has ended in order: who waits for MPI, with which deadline, and who sees the launcher out."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpisgd.liveness import leaving


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in its order, by rank 0 of a launch on two nodes."""
    done: list[str] = []
    mpi = SimpleNamespace(Finalize=lambda: done.append("finalized"))
    monkeypatch.setitem(sys.modules, "mpisgd.comm.mpi.library", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(leaving, "leave_within", lambda seconds: done.append(f"within {seconds:g} s"))
    monkeypatch.setattr(leaving.faulthandler, "cancel_dump_traceback_later", lambda: done.append("in time"))
    monkeypatch.setattr(leaving.usher, "see_out", lambda launcher: done.append(f"see out {launcher}"))
    monkeypatch.setattr(leaving, "Siblings", lambda: SimpleNamespace(launcher=7, launcher_of_this_job=7))
    monkeypatch.setattr(leaving.ulfm, "enabled", lambda: False)
    for name, value in (("RANK", "0"), ("SIZE", "4"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    return done


def test_mpi_has_a_deadline_and_what_comes_after_it_has_none(done: list[str]) -> None:
    leaving.leave()
    assert done == ["see out 7", f"within {leaving.LEAVE_S:g} s", "finalized", "in time"]


def test_one_rank_sees_the_launcher_out(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    leaving.leave()
    assert "see out 7" not in done
    assert "finalized" in done


def test_a_launcher_of_several_jobs_is_left(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "Siblings", lambda: SimpleNamespace(launcher=7, launcher_of_this_job=0))
    leaving.leave()
    assert "see out 7" not in done


def test_where_mpi_tells_of_failures_nobody_finalizes(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving.ulfm, "enabled", lambda: True)
    leaving.leave()
    assert done == ["see out 7"]


@pytest.mark.parametrize("sizes", [{"LOCAL_SIZE": "4"}, {"SIZE": "", "LOCAL_SIZE": ""}])
def test_on_one_node_and_under_other_launchers_nothing_is_done(
    done: list[str], monkeypatch: pytest.MonkeyPatch, sizes: dict[str, str]
) -> None:
    for name, value in sizes.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    leaving.leave()
    assert done == []
