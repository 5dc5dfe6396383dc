"""A failure is loud, quick and named, and a refusal is every rank's (DESIGN 4, law 9): over a communicator of threads."""

from __future__ import annotations

import pickle
import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from mpisgd.base.errors import EXIT_FAILED, ConfigError, DataError, PeerError, in_words
from mpisgd.liveness import guard
from mpisgd.liveness.guard import AgreedError, agree, failing_fast, launched_rank
from tests.unit.fakes import Aborted, Threads

RANKS = guard.RANK_VARIABLES


@pytest.fixture(autouse=True)
def _tests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rank that is not MPI's was to leave."""
    monkeypatch.setattr(guard, "leave_within", lambda seconds: None)


@pytest.mark.parametrize(
    ("refusing", "message", "status"),
    [
        ({}, None, None),
        ({2: DataError("no file")}, "rank 2: DataError: no file", 2),
        ({0: DataError("no file"), 1: DataError("no file")}, "rank 0-1: DataError: no file", 2),
        (dict.fromkeys((0, 1, 3, 5), ConfigError("mu = 0")), "rank 0-1, 3, 5: ConfigError: mu = 0", 2),
        (dict.fromkeys(range(6), ConfigError("mu = 0")), "ConfigError: mu = 0", 2),
        (
            {4: ConfigError("shape"), 1: DataError("no file"), 5: ConfigError("shape")},
            "rank 1: DataError: no file\nrank 4-5: ConfigError: shape",
            2,
        ),
        ({3: PeerError("tag"), 4: ConfigError("mu = 0")}, "rank 3: PeerError: tag\nrank 4: ConfigError: mu = 0", 1),
    ],
)
def test_where_one_refuses_all_do_with_one_message(refusing: dict[int, Exception], message: str | None, status: int | None) -> None:
    comm = Threads(6)

    def start(rank: int) -> int:
        if rank in refusing:
            raise refusing[rank]
        return 10 * rank

    ends = comm.everywhere(lambda rank: agree(comm, lambda: start(rank)))  # type: ignore[arg-type]
    if message is None:
        assert ends == [0, 10, 20, 30, 40, 50]
        return
    assert {type(end) for end in ends} == {AgreedError}
    assert {str(end) for end in ends} == {message}
    assert {end.exit_status for end in ends} == {status}


def test_a_bug_is_not_agreed_on_but_passes_through() -> None:
    """It ends the job; nobody waits, because `failing_fast` is around."""
    with pytest.raises(ZeroDivisionError):
        agree(Threads(1), lambda: 1 // 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 5], "1, 3, 5"), ([7, 8], "7-8"), (list(range(100)), "0-99"), ([], "")],
)
def test_ranges(ranks: list[int], text: str) -> None:
    assert guard.ranges(ranks) == text


@pytest.mark.parametrize("error", [PeerError("slice of 3 bytes"), ConfigError("mu = 0"), ValueError("bug"), KeyboardInterrupt()])
def test_a_failing_rank_ends_the_job_and_is_named(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    comm = Threads(2)
    with pytest.raises(Aborted), failing_fast(comm, lambda: "learner 3"):  # type: ignore[arg-type]
        raise error
    told = capsys.readouterr().err
    host = socket.gethostname()
    assert told.endswith(f"mpisgd: rank 0 (learner 3) on {host} failed, the job is ended\n{in_words(error)}\n")
    assert ("Traceback" in told) is not isinstance(error, PeerError | ConfigError)
    assert comm.aborted == [2 if isinstance(error, ConfigError) else 1]


def test_a_rank_goes_though_abort_comes_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As MPICH's did, one time in seven, where two ranks found the disk full: the rank went on to say less of the same again."""
    comm = Threads(2)
    monkeypatch.setattr(comm, "Abort", comm.aborted.append)

    def leave(status: int) -> None:
        raise Aborted(status)

    monkeypatch.setattr(guard.os, "_exit", leave)
    with pytest.raises(Aborted, match=r"^2$"), failing_fast(comm, lambda: "shard 0"):  # type: ignore[arg-type]
        raise ConfigError("mu = 0")
    assert comm.aborted == [2]
    assert capsys.readouterr().err.endswith("ConfigError: mu = 0\n")


def test_what_all_know_needs_no_abort(capsys: pytest.CaptureFixture[str]) -> None:
    comm = Threads(1)
    with pytest.raises(AgreedError), failing_fast(comm, lambda: "starting"):  # type: ignore[arg-type]
        raise AgreedError("mu = 0", 2)
    with failing_fast(comm, lambda: "shard 0"):  # type: ignore[arg-type]
        pass
    assert (comm.aborted, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize(("seconds", "calls"), [("60", ["dump in 60.0 s, again", "cancel"]), ("0", []), (None, [])])
def test_the_hang_switch(seconds: str | None, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISGD_HANG_S", raising=False)
    if seconds is not None:
        monkeypatch.setenv("MPISGD_HANG_S", seconds)
    told: list[str] = []
    dump = "dump_traceback_later"
    monkeypatch.setattr(guard.faulthandler, dump, lambda s, repeat: told.append(f"dump in {s} s{', again' * repeat}"))
    monkeypatch.setattr(guard.faulthandler, f"cancel_{dump}", lambda: told.append("cancel"))
    with failing_fast(Threads(1), lambda: "shard 0"):  # type: ignore[arg-type]
        pass
    assert told == calls


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        *(({name: "7"}, 7) for name in RANKS),
        ({"PMI_RANK": "3", "SLURM_PROCID": "0"}, 3),  # mpiexec in a SLURM job: its own rank, not that of its daemon
        ({"OMPI_COMM_WORLD_RANK": "", "PMI_RANK": "4"}, 4),
        ({"PMI_RANK": "-1"}, 0),
    ],
)
def test_the_launchers_rank_is_known_without_mpi(environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == rank


def test_a_process_leaves_in_time_whatever_hangs() -> None:
    """It sleeps with Python's global lock held, as a call of MPI may, so none of its threads can run."""
    script = (
        "import ctypes; from mpisgd.comm.mpi.node_processes import leave_within; leave_within(0.5); ctypes.PyDLL(None).sleep(1000)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=300, check=False).returncode == EXIT_FAILED


def test_a_process_that_may_open_no_more_files_leaves_all_the_same() -> None:
    """A failure for just that reason would end in another one, and the job when others have waited for their patience."""
    script = """
import resource, time
from mpisgd.comm.mpi.node_processes import leave_within
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
leave_within(0.5)
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == EXIT_FAILED
    assert "Too many open files" not in done.stderr


FULL = """
import os
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(write, True)
os.dup2(write, 2)
from types import SimpleNamespace
from mpisgd.liveness import failure_watch, guard
guard.FORWARD_S = guard.END_S = 0.2
comm = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)
"""
FAILS = """
with guard.failing_fast(comm, lambda: "learner 3"):
    raise ValueError("bug")
"""
SEES_A_LOSS = """
failure_watch.ulfm.seen_failed = lambda comm: [0]
failure_watch.ulfm.has_turn = lambda comm, over: True
failure_watch.FailureWatch(comm, lambda: "learner 3", str)._end()
"""
STARTS = """
from mpisgd.comm.mpi import node_processes
node_processes.FORWARD_S = node_processes.END_S = 0.2
node_processes._end(SimpleNamespace(end_job=lambda: None), "rank 3")
"""


@pytest.mark.parametrize("fails", [FAILS, SEES_A_LOSS, STARTS], ids=["by itself", "over a loss", "over a loss before the start"])
def test_a_rank_whose_words_nobody_reads_leaves_all_the_same(fails: str) -> None:
    done = subprocess.run([sys.executable, "-c", FULL + fails], timeout=120, check=False)
    assert done.returncode == EXIT_FAILED


@pytest.mark.parametrize("lost", [[4], []])
def test_what_is_torn_by_a_death_names_the_dead(
    lost: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that dies while all agree can leave the others with half of what was said; without a death it is a bug."""
    monkeypatch.setattr(guard.ulfm, "enabled", lambda: True)
    monkeypatch.setattr(guard.ulfm, "failed", lambda comm: lost)
    monkeypatch.setattr(guard.ulfm, "has_turn", lambda comm, over: True)
    monkeypatch.setattr(guard.ulfm, "end_job", lambda comm, status: sys.exit(status))
    with pytest.raises(SystemExit), failing_fast(Threads(2), lambda: "starting"):  # type: ignore[arg-type]
        pickle.loads(b"\xe4")
    told = capsys.readouterr().err
    assert ("PeerError: rank 4 is lost, and this run goes on only with all ranks" in told) is bool(lost)
    assert ("UnpicklingError" in told) is not bool(lost)


def test_of_many_that_see_a_rank_lost_one_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    comm = Threads(6)
    revoked = threading.Event()
    monkeypatch.setattr(guard.ulfm, "enabled", lambda: True)
    monkeypatch.setattr(guard.ulfm, "failed", lambda comm: [0])
    monkeypatch.setattr(guard.ulfm, "seen_failed", lambda comm: [0])
    monkeypatch.setattr(Threads, "Is_revoked", lambda self: revoked.is_set(), raising=False)
    monkeypatch.setattr(guard, "FORWARD_S", 0.0)

    def end_job(comm: Any, status: int) -> None:
        revoked.set()
        sys.exit(status)

    monkeypatch.setattr(guard.ulfm, "end_job", end_job)

    def waits(rank: int) -> None:
        with suppress(SystemExit), failing_fast(comm, lambda: f"learner {rank}"):  # type: ignore[arg-type]
            if rank:
                pickle.loads(b"\xe4")

    comm.everywhere(waits)
    told = capsys.readouterr().err
    assert re.findall("rank ([0-9]) .* failed, the job is ended", told) == ["1"]
