"""Who of a node's ranks is there, from a /proc made by hand."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.node_processes import PATIENT_S, STARTED_S, NodeProcesses, several, within

JOB = "prterun-here-100@1"
ENVIRON = {"PMIX_NAMESPACE": JOB, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
LAUNCHER, OWN = 100, 201


class Proc:
    """A /proc of a launcher, its children, and whatever else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.add(LAUNCHER, parent=1)
        (root / f"{LAUNCHER}/task/101").mkdir(parents=True)

    def add(self, pid: int, parent: int, **environ: str) -> None:
        place = self.root / str(pid)
        place.mkdir()
        (place / "environ").write_text("\0".join(f"{name}={value}" for name, value in environ.items()))
        (place / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")

    def rank(self, pid: int, rank: int, job: str = JOB, parent: int = LAUNCHER) -> None:
        self.add(pid, parent, PMIX_NAMESPACE=job, PMIX_RANK=str(rank))

    def children(self, *pids: int) -> None:
        (self.root / f"{LAUNCHER}/task/101/children").write_text(" ".join(map(str, pids)))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    proc = Proc(tmp_path)
    for at in range(3):
        proc.rank(200 + at, 4 + at)
    proc.add(300, LAUNCHER, HOME="/root")
    proc.rank(301, 0, job="prterun-here-7@1")
    proc.children(200, 201, 202, 300, 301)
    return proc


def node_processes(proc: Proc, own: int = OWN) -> NodeProcesses:
    return NodeProcesses(ENVIRON, proc.root, own)


def test_one_that_was_there_and_is_there_no_more(proc: Proc) -> None:
    mine = node_processes(proc)
    assert mine.launcher == LAUNCHER
    assert mine.lost(0.0) == []
    proc.children(200, 201, 300, 301)
    assert mine.lost(0.1) == ["rank 6 (process 202)"]


def test_what_else_the_launcher_has_started_may_go(proc: Proc) -> None:
    mine = node_processes(proc)
    mine.lost(0.0)
    proc.children(200, 201, 202)
    assert mine.lost(100.0) == []


def test_one_that_never_came(proc: Proc) -> None:
    """Only when no further one has come for a while: the launcher may be starting them."""
    mine = node_processes(proc)
    proc.children(200, 300)
    assert mine.lost(0.0) == []
    proc.children(200, 201, 300)
    assert mine.lost(STARTED_S + 1) == []
    assert mine.lost(2 * STARTED_S) == []
    assert mine.lost(2 * STARTED_S + 1.1) == ["1 rank, before any other looked"]


def test_where_there_is_no_haste_a_child_that_is_no_rank_may_yet_be_one(proc: Proc) -> None:
    """Its program may not have been loaded: only who is no child at all is lost."""
    proc.children(200, 201, 300)
    mine = NodeProcesses(ENVIRON, proc.root, OWN, started_s=PATIENT_S)
    assert [mine.lost(now_s) for now_s in (1.0, PATIENT_S, 10 * PATIENT_S)] == [[], [], []]
    proc.children(200, 201)
    assert mine.lost(10 * PATIENT_S) == ["1 rank, before any other looked"]


@pytest.mark.parametrize(
    ("environ", "are"),
    [
        ({}, False),
        ({"PMIX_NAMESPACE": JOB, "OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"PMIX_NAMESPACE": JOB}, False),
        ({"PMIX_NAMESPACE": JOB, "OMPI_COMM_WORLD_SIZE": "2"}, True),
    ],
)
def test_ranks_are_watched_where_open_mpis_launcher_has_started_several(environ: dict[str, str], are: bool) -> None:
    assert several(environ) is are


def test_one_that_is_being_started_is_no_rank_yet(proc: Proc) -> None:
    """Between fork and exec it has the launcher's own environment."""
    proc.add(203, LAUNCHER, HOME="/root")
    proc.children(200, 201, 203)
    mine = node_processes(proc)
    assert mine.lost(0.0) == []
    shutil.rmtree(proc.root / "203")
    proc.rank(203, 6)
    assert mine.lost(STARTED_S + 1) == []
    proc.children(200, 201)
    assert mine.lost(STARTED_S + 2) == ["rank 6 (process 203)"]


def test_ranks_in_a_wrapper_of_the_users(proc: Proc) -> None:
    proc.rank(400, 5, parent=OWN)
    assert node_processes(proc, own=400).launcher == LAUNCHER


def test_nothing_is_seen_without_a_launcher(proc: Proc) -> None:
    assert NodeProcesses({}, proc.root, OWN).lost(100.0) == []
    unseen = NodeProcesses(ENVIRON, proc.root / "nowhere", OWN)
    assert unseen.launcher == 0
    assert unseen.lost(100.0) == []
    (proc.root / f"{LAUNCHER}/task/101/children").unlink()  # a kernel without them
    assert node_processes(proc).lost(100.0) == []


def launcher(environ: Mapping[str, str], proc: Path) -> tuple[NodeProcesses, subprocess.Popen[bytes]]:
    """A launcher that does nothing more, and one of its ranks."""
    process = subprocess.Popen(["sleep", "1000"])
    node_processes = NodeProcesses(environ, proc)
    node_processes.launcher = process.pid
    return node_processes, process


def test_a_launcher_that_hangs_is_killed() -> None:
    node_processes, process = launcher({"PMIX_NAMESPACE": "prterun-host-1@1"}, Path("/proc"))
    node_processes.end_launcher_within(0.1)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "began"), [("prterun-host-1@1", 43), ("dvm@1", 42)], ids=["another with its number", "of many jobs"]
)
def test_no_other_process_is(tmp_path: Path, job: str, began: int) -> None:
    node_processes, process = launcher({"PMIX_NAMESPACE": job}, tmp_path)
    stat = tmp_path / str(process.pid) / "stat"
    stat.parent.mkdir()
    stat.write_text(f"{process.pid} (a (b) c) S {' '.join(['7'] * 18)} 42 7 7")
    node_processes.end_launcher_within(0.5)
    stat.write_text(f"{process.pid} (a (b) c) S {' '.join(['7'] * 18)} {began} 7 7")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.kill()
    process.wait()


@pytest.mark.parametrize(("rank", "world", "begun"), [("0", "4", 1), ("1", "4", 0), ("0", "2", 0)])
def test_the_launcher_of_several_nodes_is_killed_where_mpi_does_not_start(
    rank: str, world: str, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that the first rank of each node begins, and ends once MPI has started."""
    killers: list[subprocess.Popen[bytes]] = []

    def killer(_: NodeProcesses, seconds: float) -> subprocess.Popen[bytes]:
        assert seconds > 30
        killers.append(subprocess.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True))
        return killers[-1]

    monkeypatch.setattr(NodeProcesses, "end_launcher_within", killer)
    environ = {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": world}
    with within(30.0, environ):
        assert len(killers) == begun
        assert all(each.poll() is None for each in killers)
    assert all(each.poll() == -signal.SIGKILL for each in killers)


@pytest.mark.parametrize(("local_rank", "sees_to_it"), [("0", True), ("1", True), ("2", False)])
def test_who_ends_a_job_of_which_mpi_tells_failures_sees_its_launcher_out(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, sees_to_it: bool
) -> None:
    """Open MPI's own may wait for a lock of its own for ever when its ranks have left at once."""
    done: list[object] = []
    comm: Any = SimpleNamespace(Revoke=lambda: done.append("revoked"))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    monkeypatch.setattr(ulfm, "_SPREAD_S", 0.0)
    monkeypatch.setattr(ulfm.NodeProcesses, "end_launcher_within", lambda node_processes, seconds: done.append(seconds))
    monkeypatch.setattr(ulfm, "_leave", lambda status: done.append(f"left with {status}"))
    ulfm.end_job(comm, 1)
    assert done == ["revoked", *([ulfm._LAUNCHER_S] if sees_to_it else []), "left with 1"]
