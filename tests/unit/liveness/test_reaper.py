"""A reaper and real processes, of which none is a rank: who is made to leave when the job is over, and who is not."""

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

from mpisgd.comm.mpi import node_processes
from mpisgd.liveness import absent, reaper
from mpisgd.liveness.reaper import Process, Reaper

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
    monkeypatch.setattr(reaper, "LOOK_S", 0.02)
    monkeypatch.setattr(reaper, "GRACE_S", 0.1)
    monkeypatch.setattr(reaper, "LAUNCHER_S", 0.1)
    monkeypatch.setattr(reaper, "FORCE_S", 0.1)
    running, job = tmp_path / "RUNNING", reaper.name()
    reaper.announce(running, job)
    return running, job


def lives(pid: int) -> bool:
    return Process(pid).lives


def goes(pid: int) -> bool:
    """Whether a process that was sent a signal ends."""
    return not Process(pid).lives_on(END_S)


@contextlib.contextmanager
def attending(job: tuple[Path, str], pids: list[int], first: int = 0, launcher: int = 0) -> Iterator[threading.Thread]:
    """A reaper at work."""
    with reaper.open_door(job[1]) as door:
        ranks = {pid: Process(pid) for pid in pids}
        mine = Reaper(door, *job, list(ranks.values()), ranks.get(first), Process(launcher) if launcher else None)
        thread = threading.Thread(target=mine.attend, daemon=True)
        thread.start()
        yield thread
        thread.join(END_S)
        assert not thread.is_alive()
        reaper.close_door(door)
    assert not reaper._place(job[1]).exists()


def says_that_it_leaves(job: tuple[Path, str], pid: int, given_up: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        reaper.leave(job[1], given_up=given_up)


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
        reaper.retract(*job)
    assert goes(stopped)
    assert lives(in_order), "it may do what it wants, after the run"


def test_when_rank_0_is_gone_without_order_the_job_is_over_on_all_nodes(
    job: tuple[Path, str], sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "hang_up", lambda pid: pytest.fail("a launcher that has lost its daemons may say 0"))
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
        reaper.retract(*job)
        says_that_it_leaves(job, first, given_up)
        if given_up:
            thread.join(0.5)
            assert lives(launcher), "as long as a rank of this node is there"
        os.kill(first, signal.SIGKILL)
    assert goes(launcher) if given_up else lives(launcher)


def test_rank_0_has_left_in_order_though_it_is_not_heard(job: tuple[Path, str], sleeper: Callable[[], int]) -> None:
    """The reaper is late, and others fill the queue."""
    first, launcher = sleeper(), sleeper()
    rank = Process(first)
    with reaper.open_door(job[1]) as door:
        reaper.retract(*job)
        os.kill(first, signal.SIGKILL)
        assert goes(first)
        Reaper(door, *job, [rank], rank, Process(launcher)).attend()
        reaper.close_door(door)
    assert Process(launcher).lives_on(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_launcher_that_waits_when_all_have_left_in_order_is_ended(
    sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(reaper, "LEAVE_S", 0.5)
    monkeypatch.setattr(reaper, "FORCE_S", 0.1)
    first, launcher = sleeper(), sleeper()
    thread = threading.Thread(target=reaper.main, args=([reaper._SEE_OUT, str(first), str(launcher)],), daemon=True)
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
    reaper.announce(running, "another attempt")
    with attending(job, [first, other], first):
        pass
    assert goes(other), "this job is over"
    assert running.read_text() == "another attempt"
    reaper.retract(*job)
    assert running.exists()


def test_a_file_system_that_fails_says_nothing(job: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_text", fails)
    assert reaper._is_of(*job)


def test_a_directory_that_was_removed_under_the_job_says_nothing_until_rank_0_is_gone(
    job: tuple[Path, str], sleeper: Callable[[], int]
) -> None:
    """The ranks are to find out by themselves, and to say so."""
    running, _ = job
    gone = running.parent / "run" / "RUNNING"
    assert reaper._is_of(gone, job[1])
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
        reaper.hang_up(process.pid)
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
    reaper.call(*job, [rank])
    until_s = time.monotonic() + END_S
    while not (found := [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if str(job[0]) in words(path)]):
        assert time.monotonic() < until_s
    (place,) = found
    assert b"OMPI_COMM_WORLD_RANK" not in (place / "environ").read_bytes()
    assert {str((place / "fd" / str(number)).readlink()) for number in range(3)} == {"/dev/null"}
    os.kill(rank, signal.SIGSTOP)
    reaper.retract(*job)
    while lives(rank) or lives(int(place.name)):  # after GRACE_S, which is another one there
        assert time.monotonic() < until_s
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------------------- strangers

NOBODY = 65534


def as_nobody(code: str, *words: str) -> subprocess.Popen[str]:
    """A program of another user."""
    other = f"import os, socket, sys\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    command = [sys.executable, "-I", "-S", "-c", other, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd="/")


def words_of(code: str, *words: str) -> str:
    """The last words of such a program."""
    out, err = as_nobody(code, *words).communicate(timeout=60)
    return (out or err).strip().splitlines()[-1]


SPEAK = """
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
    for _ in range(10_000):
        speaker.sendto(sys.argv[2].encode(), sys.argv[1])
print("heard")
"""
HOLD = """
held = socket.socket(socket.AF_UNIX)
held.bind("\\0" + sys.argv[1])
held.listen()
print("holds", flush=True)
sys.stdin.read()
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@as_root
def test_another_user_cannot_speak_to_a_reaper(job: tuple[Path, str], sleeper: Callable[[], int]) -> None:
    rank = sleeper()
    with attending(job, [rank]) as thread:
        door = str(reaper._place(job[1]) / "door")
        assert "PermissionError" in words_of(SPEAK, door, f"{job[1]} {rank} 1")
        assert "PermissionError" in words_of("os.unlink(sys.argv[1])", door)
        assert thread.is_alive()
        reaper.retract(*job)
    assert goes(rank), "it has not left in order"


@pytest.mark.parametrize(
    "garbage", ["", "1", "a b c", "x" * 100_000, "\0" * 64, "{job} {rank}", "{job} no 1", "other {rank} 1", "{job} {rank} 1 1"]
)
def test_garbage_is_ignored(garbage: str, job: tuple[Path, str], sleeper: Callable[[], int]) -> None:
    rank = sleeper()
    with attending(job, [rank]) as thread:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
            for raw in (garbage.format(job=job[1], rank=rank).encode(), b"\xff\xfe\x00"):
                speaker.sendto(raw, str(reaper._place(job[1]) / "door"))
        thread.join(0.2)
        assert thread.is_alive()
        says_that_it_leaves(job, rank)
    assert lives(rank), "it is heard all the same"


@as_root
def test_a_name_that_another_user_holds_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    name = f"{absent._prefix()}1-123"
    begun = as_nobody(HOLD, name)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "holds\n"
    assert node_processes.hold(name) is None
    assert not node_processes.is_held(name)
    assert absent.gone() == []
    own = node_processes.hold(f"{absent._prefix()}2-124")
    assert own is not None
    assert absent.gone() == [2]
    own.close()
    assert absent.gone() == []
    begun.communicate()


CROWD = """
held = []
try:
    for _ in range(10_000):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].setblocking(False)
        held[-1].connect("\\0" + sys.argv[1])
except OSError as error:
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""


@as_root
@pytest.mark.parametrize("held_by", ["the user", "another user"])
def test_a_crowd_of_another_user_before_a_name_hides_no_sign_and_makes_none(held_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows it may connect to it until its queue is full, and nobody can then ask who holds it."""
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    name = f"{absent._prefix()}3-{os.getpid()}"
    begun = [as_nobody(HOLD, name)] if held_by == "another user" else []
    own = None if begun else node_processes.hold(name)
    for process in begun:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
    begun.append(as_nobody(CROWD, name))
    assert begun[-1].stdout is not None
    assert begun[-1].stdout.readline() == "BlockingIOError\n"
    assert absent.gone() == ([3] if own else [])
    for process in begun:
        process.communicate()
    if own:
        own.close()
    assert absent.gone() == []


@as_root
def test_whoever_squats_the_name_of_a_job_that_fails_does_not_silence_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    for pause in ("FORWARD_S", "END_S"):
        monkeypatch.setattr(node_processes, pause, 0.0)
    begun = as_nobody(HOLD, f"mpisgd-test-{os.getpid()}")
    assert begun.stdout is not None
    begun.stdout.readline()
    said: list[str] = []
    monkeypatch.setattr(node_processes, "last_words", said.append)
    monkeypatch.setattr(node_processes, "leave_within", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", lambda status: said.append(str(status)))
    ended: list[str] = []

    class Told:
        def end_job(self) -> None:
            ended.append("told")

    node_processes._end(Told(), "rank 3")  # type: ignore[arg-type]
    assert "lost on" in said[0]
    assert ended == ["told"]
    begun.communicate()


def test_the_file_that_all_nodes_ask_for_is_asked_for_100_times_a_second_at_most(
    job: tuple[Path, str], sleeper: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(reaper, "_is_of", lambda *_: bool(asked.append(time.monotonic())) or True)
    for nodes, pause_s in ((1, 0.02), (50, 0.5), (1000, 10.0), (100_000, 30.0)):
        with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as door:
            mine = Reaper(door, *job, [Process(sleeper())], nodes=nodes)
            assert mine._pause_s == pause_s
            mine._next_s = 0.0
            asked.clear()
            assert not any(mine._is_over() for _ in range(100))
            assert len(asked) == 1
