"""An usher and real processes, of which none is a rank: who is made to leave when the job is over, and who is not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpisgd.liveness import usher
from mpisgd.liveness.usher import Process, Usher

END_S = 100.0


@pytest.fixture
def sleeper() -> Iterator[Callable[[], int]]:
    """Starts a process that would be there for long."""
    begun: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        begun.append(subprocess.Popen(["sleep", "600"]))
        return begun[-1].pid

    yield start
    for process in begun:
        process.kill()
        process.wait()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    monkeypatch.setattr(usher, "LOOK_S", 0.02)
    monkeypatch.setattr(usher, "GRACE_S", 0.1)
    monkeypatch.setattr(usher, "LAUNCHER_S", 0.1)
    monkeypatch.setattr(usher, "FORCE_S", 0.1)
    running, job = tmp_path / "RUNNING", usher.name("here", os.getpid(), str(tmp_path))
    usher.announce(running, job)
    return running, job


def lives(pid: int) -> bool:
    return Process(pid).lives


def goes(pid: int) -> bool:
    """Whether a process that was sent a signal ends."""
    return not Process(pid).lives_on(END_S)


@contextlib.contextmanager
def attending(job: tuple[Path, str], pids: list[int], first: int = 0, launcher: int = 0) -> Iterator[threading.Thread]:
    """An usher at work."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(usher._address(job[1]))
        ranks = {pid: Process(pid) for pid in pids}
        mine = Usher(door, *job, list(ranks.values()), ranks.get(first), Process(launcher) if launcher else None)
        thread = threading.Thread(target=mine.attend, daemon=True)
        thread.start()
        yield thread
        thread.join(END_S)
        assert not thread.is_alive()


def says_that_it_leaves(job: tuple[Path, str], pid: int, given_up: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        usher.leave(job[1], given_up=given_up)


def test_one_that_is_stopped_is_made_to_leave_and_one_that_left_in_order_is_not(
    job: tuple[Path, str], sleeper: Callable[[], int]
) -> None:
    stopped, in_order = sleeper(), sleeper()
    os.kill(stopped, signal.SIGSTOP)
    with attending(job, [stopped, in_order]) as thread:
        says_that_it_leaves(job, in_order)
        thread.join(0.3)
        assert thread.is_alive()
        assert lives(stopped), "the job runs"
        usher.retract(*job)
    assert goes(stopped)
    assert lives(in_order), "it may do what it wants, after the run"


def test_when_rank_0_is_gone_without_order_the_job_is_over_on_all_nodes(
    job: tuple[Path, str], sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usher, "hang_up", lambda pid: pytest.fail("a launcher that has lost its daemons may say 0"))
    first, other, launcher = sleeper(), sleeper(), sleeper()
    with attending(job, [first, other], first, launcher):
        os.kill(first, signal.SIGKILL)
    assert not job[0].exists(), "which tells the other nodes"
    assert goes(other)
    assert goes(launcher), "it waits for ranks that it cannot hear of"


@pytest.mark.parametrize("given_up", [False, True])
def test_the_launcher_is_ended_only_where_another_node_may_hang(
    job: tuple[Path, str], sleeper: Callable[[], int], given_up: bool
) -> None:
    first, launcher = sleeper(), sleeper()
    with attending(job, [first], first, launcher) as thread:
        usher.retract(*job)
        says_that_it_leaves(job, first, given_up)
        if given_up:
            thread.join(0.5)
            assert lives(launcher), "as long as a rank of this node is there"
        os.kill(first, signal.SIGKILL)
    assert goes(launcher) if given_up else lives(launcher)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_launcher_that_waits_when_all_have_left_in_order_is_ended(
    sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(usher, "LEAVE_S", 0.5)
    monkeypatch.setattr(usher, "FORCE_S", 0.1)
    first, launcher = sleeper(), sleeper()
    thread = threading.Thread(target=usher.main, args=([usher._SEE_OUT, str(first), str(launcher)],), daemon=True)
    thread.start()
    thread.join(1.0)
    assert lives(launcher), "rank 0 is still there"
    if not waits:
        os.kill(launcher, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    thread.join(END_S)
    assert not thread.is_alive()
    assert goes(launcher)


def test_a_file_of_another_job_is_left(job: tuple[Path, str], sleeper: Callable[[], int]) -> None:
    running, _ = job
    first, other = sleeper(), sleeper()
    usher.announce(running, "another attempt")
    with attending(job, [first, other], first):
        pass
    assert goes(other), "this job is over"
    assert running.read_text() == "another attempt"
    usher.retract(*job)
    assert running.exists()


def test_a_file_system_that_fails_says_nothing(job: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_text", fails)
    assert usher._is_of(*job)


def test_a_directory_that_was_removed_under_the_job_says_nothing_until_rank_0_is_gone(
    job: tuple[Path, str], sleeper: Callable[[], int]
) -> None:
    """The ranks are to find out by themselves, and to say so."""
    running, _ = job
    gone = running.parent / "run" / "RUNNING"
    assert usher._is_of(gone, job[1])
    first, other = sleeper(), sleeper()
    with attending((gone, job[1]), [first, other], first) as thread:
        thread.join(0.3)
        assert lives(other)
        os.kill(first, signal.SIGKILL)
    assert goes(other)


def test_one_that_has_the_number_of_a_rank_is_left(tmp_path: Path) -> None:
    stat = tmp_path / "1" / "stat"
    stat.parent.mkdir()
    fields = "1 (a (b) c) S 0 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {began} 0"
    stat.write_text(fields.format(began=5))
    rank = Process(1, tmp_path)
    assert rank.lives
    stat.write_text(fields.format(began=6))
    assert not rank.lives
    stat.write_text(fields.format(began=5).replace(" S ", " Z "))
    assert not rank.lives
    stat.unlink()
    assert not rank.lives
    assert not Process(1, tmp_path).lives


CONNECTED = """
import socket, sys
far = socket.create_connection(("127.0.0.2", int(sys.argv[1])))  # the other end has another address
own = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
file = open("/dev/null")
print("connected", flush=True)
far.settimeout(30)
assert far.recv(1) == b""
own.sendall(b"x")
print("ended", flush=True)
"""


def test_connections_to_other_machines_end_and_no_others() -> None:
    with socket.create_server(("", 0)) as server:
        words = [sys.executable, "-c", CONNECTED, str(server.getsockname()[1])]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        (far, _), (own, _) = server.accept(), server.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        usher.hang_up(process.pid)
        assert process.communicate(timeout=END_S)[0] == "ended\n"
        with far, own:
            assert far.recv(1) == b""
            assert own.recv(1) == b"x"


def words(cmdline: Path) -> list[str]:
    """A process's, which has none for a moment when it begins."""
    try:
        return cmdline.read_text(errors="replace").split("\0")
    except OSError:
        return []


@pytest.mark.slow
def test_it_is_started_as_a_process_that_holds_nothing_of_a_ranks(
    job: tuple[Path, str], sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    rank = sleeper()
    usher.call(*job, [rank])
    until_s = time.monotonic() + END_S
    while not (found := [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if job[1] in words(path)]):
        assert time.monotonic() < until_s
    (place,) = found
    assert b"OMPI_COMM_WORLD_RANK" not in (place / "environ").read_bytes()
    assert {str((place / "fd" / str(number)).readlink()) for number in range(3)} == {"/dev/null"}
    os.kill(rank, signal.SIGSTOP)
    usher.retract(*job)
    while lives(rank) or lives(int(place.name)):  # after GRACE_S, which is another one there
        assert time.monotonic() < until_s
        time.sleep(0.02)
