"""The end of a process whose job has ended in order: who waits for MPI, with which deadline, and who sees the launcher out; and of
one that refuses what all refuse: who tells, and with which status each leaves."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from types import SimpleNamespace

import pytest

import mpisgd
from mpisgd.base.errors import ConfigError, RunInterrupted
from mpisgd.liveness import leaving


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in its order, by rank 0 of a launch on two nodes."""
    done: list[str] = []
    mpi = SimpleNamespace(Finalize=lambda: done.append("finalized"))
    monkeypatch.setitem(sys.modules, "mpisgd.comm.mpi.library", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(leaving, "leave_within", lambda seconds: done.append(f"within {seconds:g} s"))
    monkeypatch.setattr(leaving.faulthandler, "cancel_dump_traceback_later", lambda: done.append("in time"))
    monkeypatch.setattr(leaving.reaper, "see_out", lambda launcher: done.append(f"see out {launcher}"))
    monkeypatch.setattr(leaving, "NodeProcesses", lambda: SimpleNamespace(launcher=7, launcher_of_this_job=7))
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
    monkeypatch.setattr(leaving, "NodeProcesses", lambda: SimpleNamespace(launcher=7, launcher_of_this_job=0))
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


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """This is a rank of several; what is said and done when nobody catches an error."""
    told: list[tuple[str, ...]] = []

    def leave_together(status: int, reason: str, comm: object) -> int:
        told.append(("together", str(status), reason))
        return status if leaving.launched_rank() == 0 else 0

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(leaving, "leave_together", leave_together)
    monkeypatch.setattr(leaving.ulfm, "leave", lambda status: None)
    monkeypatch.setattr(leaving.signal, "alarm", lambda seconds: told.append(("alarm", str(seconds))))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(("traceback", str(error))))
    return told


@pytest.mark.parametrize(("rank", "status", "tells"), [("0", 2, [("traceback", "mu = 0")]), ("3", 0, [])])
def test_of_what_all_refuse_the_first_rank_tells_and_says_the_status(
    several: list[tuple[str, ...]], rank: str, status: int, tells: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    with pytest.raises(ConfigError) as refused, leaving.as_one(None):
        raise ConfigError("mu = 0")
    with pytest.raises(SystemExit) as end:
        sys.excepthook(ConfigError, refused.value, None)
    assert end.value.code == status
    # the first rank's alarm alone ends a rank that hangs at its end: a launcher may wait in vain for ranks that all end at once
    alarm = leaving.END_S if rank == "0" else 2 * leaving.END_S
    assert several == [*tells, ("together", "2", "ConfigError: mu = 0"), ("alarm", str(alarm))]


def test_another_error_that_nobody_catches_is_told_as_ever(several: list[tuple[str, ...]]) -> None:
    """The one that was refused has been caught."""
    with pytest.raises(ConfigError), leaving.as_one(None):
        raise ConfigError("mu = 0")
    sys.excepthook(ValueError, ValueError("of the user's"), None)
    assert several == [("traceback", "of the user's")]


@pytest.mark.parametrize(("rank", "code"), [("0", 85), ("3", 0)])
def test_of_a_signal_the_first_rank_says_the_status(rank: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    with pytest.raises(RunInterrupted, match="by SIGUSR1") as end, leaving.as_one(None):
        raise RunInterrupted("interrupted by SIGUSR1")
    assert end.value.code == code


def test_a_process_by_itself_raises_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = sys.excepthook
    with pytest.raises(ConfigError), leaving.as_one(None):
        raise ConfigError("mu = 0")
    assert sys.excepthook is hook


def test_a_worker_that_imports_the_script_waits_for_nobody(monkeypatch: pytest.MonkeyPatch, several: list[tuple[str, ...]]) -> None:
    """It has its rank's environment, and is none."""
    hook = sys.excepthook
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="as a worker process imports the script"):
        mpisgd.train()
    assert sys.excepthook is hook and several == []


def test_of_several_errors_that_were_caught_none_is_kept(several: list[tuple[str, ...]]) -> None:
    """With its traceback, and all that this refers to."""
    for value in range(3):
        with pytest.raises(ConfigError), leaving.as_one(None):
            raise ConfigError(f"mu = {-value}")
    before, refused, _ = sys.excepthook.args  # type: ignore[attr-defined]
    assert str(refused) == "mu = -2" and not isinstance(before, functools.partial)


@pytest.mark.parametrize(("rank", "status"), [("0", 2), ("1", 0)])
def test_the_launchers_first_rank_says_the_status_also_where_mpi_knows_no_other(
    rank: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of another launcher's: each is the first of one."""
    world = SimpleNamespace(Ibarrier=lambda: SimpleNamespace(Test=lambda: True), Get_rank=lambda: 0)
    mpi = SimpleNamespace(COMM_WORLD=world, Exception=RuntimeError)
    monkeypatch.setitem(sys.modules, "mpisgd.comm.mpi.library", SimpleNamespace(MPI=mpi))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert leaving.leave_together(2, "ConfigError: mu = 0") == status
