"""Whether all ranks run: who asks whom and when, who answers, and how long a silence must be. The network is a list."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mpisgd.comm.presence import Losses
from mpisgd.comm.waiting import Meeting, Waiting
from mpisgd.liveness import guard, heartbeat
from mpisgd.liveness.heartbeat import LEAST_S, TICK_S, Heartbeat
from mpisgd.liveness.watch import LOOK_S, Watch
from tests.unit.fakes import Status


@pytest.fixture(autouse=True)
def _without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Status=Status, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=1, Exception=OSError)
    mpi.THREAD_MULTIPLE, mpi.Query_thread = 3, lambda: 3
    monkeypatch.setitem(sys.modules, "mpisgd.comm.mpi.library", SimpleNamespace(MPI=mpi))


class Network:
    """Messages that have been sent, and not taken: sender, receiver, tag."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []
        self.count = 0
        self.lock = threading.Lock()


class Comm:
    def __init__(self, network: Network, rank: int, size: int) -> None:
        self.network, self.rank, self.size = network, rank, size
        self.freed = False

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Isend(self, body: bytearray, rank: int, tag: int) -> Any:
        with self.network.lock:
            self.network.sent.append((self.rank, rank, tag))
        self.network.count += 1
        return SimpleNamespace(Test=lambda: True, Wait=lambda: None)

    def Dup(self) -> Comm:
        return Comm(self.network, self.rank, self.size)

    def Free(self) -> None:
        self.freed = True

    def Send(self, body: bytearray, rank: int, tag: int) -> None:
        self.Isend(body, rank, tag)

    def Recv(self, into: bytearray, source: int, tag: int, status: Any) -> None:
        until_s = time.monotonic() + 30.0
        while self.Improbe(source, tag, status) is None:
            assert time.monotonic() < until_s, "nobody sends this"
            time.sleep(0.001)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        with self.network.lock:
            for at, (sender, to, tagged) in enumerate(self.network.sent):
                if to == self.rank and source in (sender, -1):
                    del self.network.sent[at]
                    status.source, status.tag, status.nbytes = sender, tagged, 1
                    return SimpleNamespace(Recv=lambda into: None)
        return None


class Job:
    """Shards 0 and 1, learners on the other ranks, who look every second."""

    def __init__(self, patience_s: float, *, ranks: int = 4, tolerant: bool = False) -> None:
        self.network, self.now_s = Network(), 100.0
        self.ended: list[tuple[int, dict[int, float], float]] = []
        self.waits, self.shards_waits = Waiting(), Waiting()
        """Of all learners, and of all shards."""
        self.waits.awaited, self.shards_waits.awaited = "the answer", "anything"
        self.ranks = [self.heartbeat(rank, ranks, patience_s) for rank in range(ranks)]
        self.losses = Losses()
        """Of shard 0."""
        for rank, each in enumerate(self.ranks if tolerant else ()):
            each.tolerate((0, 1), self.shards_waits if rank < 2 else self.waits, Losses() if rank else self.losses)

    def heartbeat(self, rank: int, size: int, patience_s: float) -> Heartbeat:
        comm: Any = Comm(self.network, rank, size)
        made = Heartbeat(comm, patience_s, lambda: "", now_s=lambda: self.now_s)
        made.end = lambda silent_s: self.ended.append((rank, silent_s, self.now_s))  # type: ignore[method-assign]
        return made

    def go_on(self, seconds: int, *, without: Collection[int] = (), cut: Collection[int] = ()) -> None:
        """`without` these ranks, who are stopped; or while nothing passes between those on this side of a `cut` and the others."""
        for _ in range(seconds):
            self.now_s += 1.0
            for rank, each in enumerate(self.ranks):
                if rank not in without:
                    each.look()
                    self.network.sent = [each for each in self.network.sent if not cut or (each[0] in cut) == (each[1] in cut)]


# ---------------------------------------------------------------------------------------------------------- fail-fast


def test_who_lives_may_wait_and_compute_for_ever() -> None:
    job = Job(20.0)
    job.go_on(1000)
    assert job.ended == []


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_one_that_is_stopped_for_longer_than_is_patient_ends_the_job(victim: int) -> None:
    job = Job(20.0)
    job.go_on(50)
    for _ in range(10):
        job.go_on(20, without=[victim])
        job.go_on(5)
    assert job.ended == [], "never for longer"
    stopped_s = job.now_s
    job.go_on(30, without=[victim])
    assert {rank for rank, _, _ in job.ended} == ({1, 2, 3} if victim == 0 else {0})
    assert all(list(silent_s) == [victim] for _, silent_s, _ in job.ended)
    _, silent_s, at_s = job.ended[0]
    assert 20.0 < at_s - stopped_s <= 20.0 + 2.0 + TICK_S + 2 * LOOK_S, "from one asking to the next, and two looks"
    assert silent_s[victim] > 20.0


def test_a_link_that_is_cut_ends_both_sides() -> None:
    job = Job(20.0, ranks=6)
    job.go_on(50)
    job.go_on(30, cut=[3, 4, 5])
    assert {rank for rank, _, _ in job.ended} == {0, 3, 4, 5}
    told = {rank: set(silent_s) for rank, silent_s, _ in job.ended}
    assert told == {0: {3, 4, 5}, 3: {0}, 4: {0}, 5: {0}}


def test_a_job_that_is_stopped_as_a_whole_goes_on() -> None:
    job = Job(20.0)
    job.go_on(50)
    job.now_s += 10_000.0
    for rank in (1, 2, 3):  # they do not go on all at once
        job.go_on(3, without=range(rank, 4))
    job.go_on(50)
    assert job.ended == []


def test_one_that_is_stopped_in_the_start_is_noticed_too() -> None:
    job = Job(20.0)
    job.go_on(30, without=[2])
    assert {(rank, *silent_s) for rank, silent_s, _ in job.ended} == {(0, 2)}


@pytest.mark.parametrize("tolerant", [False, True])
def test_no_silence_is_too_short(tolerant: bool) -> None:
    job = Job(0.1, tolerant=tolerant)
    job.go_on(int(LEAST_S), without=[1])
    assert job.ended == []
    job.go_on(5, without=[1])
    assert {who for _, silent_s, _ in job.ended for who in silent_s} == {1}


def test_a_rank_sends_ten_messages_in_its_patience() -> None:
    job = Job(100.0, ranks=5)
    job.go_on(1000)
    assert job.network.count == 2 * 4 * 100


# ------------------------------------------------------------------------------------------------------- fault-tolerant


def test_one_that_does_not_wait_asks_nobody() -> None:
    job = Job(20.0, tolerant=True)
    job.waits.awaited = None
    job.go_on(100, without=[0, 1])
    assert job.network.count == 0
    assert job.ended == []


def test_a_shard_that_lives_may_be_waited_for_for_ever() -> None:
    job = Job(20.0, tolerant=True)
    job.shards_waits.awaited = Meeting(1)
    job.go_on(1000, without=[3])
    assert job.ended == []


def test_a_shard_that_hangs_is_told_of_when_its_silence_has_lasted() -> None:
    """By a learner that waits for it, and by the evaluator."""
    job = Job(20.0, tolerant=True)
    job.go_on(50)
    job.go_on(20, without=[1])
    assert job.ended == []
    job.go_on(8, without=[1])
    assert {(rank, *silent_s) for rank, silent_s, _ in job.ended} == {(2, 1), (3, 1)}


def test_the_questions_of_a_shard_do_not_answer_those_of_a_learner() -> None:
    """Nothing comes from learner 3 to shard 0, which asks for it: learner 3 waits for a shard that will never hear it."""
    job = Job(20.0, tolerant=True)
    job.losses.silent([2, 3])
    job.go_on(50)
    assert job.ended == []
    for _ in range(30):
        job.go_on(1)
        job.network.sent = [each for each in job.network.sent if each[:2] != (3, 0)]
    assert {(rank, *silent_s) for rank, silent_s, _ in job.ended} == {(3, 0)}
    assert job.losses.silent([2, 3]) == {3}


def test_a_shard_that_waits_for_another_tells_of_its_silence() -> None:
    """Shard 0 evaluates, and no learner is left to ask."""
    job = Job(20.0, tolerant=True)
    job.go_on(50, without=[1, 2, 3])
    assert job.ended == []
    job.shards_waits.awaited = Meeting(1)
    job.go_on(20, without=[1, 2, 3])
    assert job.ended == [], "from the wait on"
    job.go_on(8, without=[1, 2, 3])
    assert {(rank, *silent_s) for rank, silent_s, _ in job.ended} == {(0, 1)}


def test_a_shard_that_waits_for_a_silent_learner_does_not_end_the_job() -> None:
    job = Job(20.0, tolerant=True)
    job.shards_waits.awaited = Meeting(3)
    job.go_on(100, without=[2, 3])
    assert job.ended == []


def test_a_wait_that_is_over_begins_anew() -> None:
    job = Job(20.0, tolerant=True)
    for _ in range(10):
        job.go_on(15, without=[1])
        job.waits.waits += 1
    assert job.ended == []


def test_one_that_was_stopped_itself_blames_nobody() -> None:
    job = Job(20.0, tolerant=True)
    for _ in range(5):  # between two askings, and while an answer is under way
        job.go_on(7)
        job.now_s += 10_000.0
    job.go_on(10)
    assert job.ended == []


def test_a_shard_asks_those_alone_whom_its_loop_watches_and_ends_nothing() -> None:
    job = Job(20.0, tolerant=True)
    job.waits.awaited = None
    job.go_on(100, without=[3])
    assert job.network.count == 0
    assert job.losses.silent([2, 3]) == frozenset(), "from now on"
    job.go_on(20, without=[3])
    assert job.losses.silent([2, 3]) == frozenset()
    job.go_on(8, without=[3])
    assert job.losses.silent([2, 3]) == {3}
    job.go_on(4)
    assert job.losses.silent([2, 3]) == frozenset(), "it is back"
    assert job.ended == []


def test_who_is_watched_again_is_silent_from_then_on() -> None:
    job = Job(20.0, tolerant=True)
    job.losses.silent([3])
    job.go_on(40, without=[3])
    assert job.losses.silent([2]) == frozenset(), "nobody asks for 3 any more"
    job.go_on(1, without=[3])
    assert job.losses.silent([3]) == frozenset()
    job.go_on(20, without=[3])
    assert job.losses.silent([3]) == frozenset()
    job.go_on(8, without=[3])
    assert job.losses.silent([3]) == {3}


# ------------------------------------------------------------------------------------------------------------- the end


def test_until_it_beats_there_is_the_deadline_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """To copy a communicator all wait for all: a link that is down then would hang the job."""
    done: list[str] = []

    @contextmanager
    def within(seconds: float) -> Iterator[None]:
        done.append(f"within {seconds:g} s")
        yield
        done.append("in time")

    monkeypatch.setattr(heartbeat, "within", within)
    monkeypatch.setenv("MPISGD_START_S", "7")
    monkeypatch.delenv("MPISGD_HANG_S", raising=False)
    monkeypatch.setattr(Comm, "Dup", lambda comm: done.append("copied") or comm)
    each = Job(20.0, ranks=2).ranks[1]
    assert each.begin()
    assert done == ["within 7 s", "copied", "in time"]


def parting(each: Heartbeat, watch: Watch) -> threading.Thread:
    def part() -> None:
        watch.close()
        each.drain()

    return threading.Thread(target=part, daemon=True)


def test_at_the_end_nothing_is_left_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub still beats when the others part: it hears their last words then, or afterwards."""
    monkeypatch.setattr(heartbeat.ulfm, "enabled", lambda: False)
    monkeypatch.setattr(Heartbeat, "every_s", 0.001)
    job = Job(20.0)
    comms: list[Any] = []
    watches = [Watch() for _ in job.ranks]
    for each, watch in zip(job.ranks, watches, strict=True):
        watch.begin(each)
        comms.append(each._comm)
    assert all(each.beats for each in job.ranks)
    early = [parting(job.ranks[rank], watches[rank]) for rank in (1, 2)]
    for thread in early:
        thread.start()
    until_s = time.monotonic() + 30.0
    while len(job.ranks[0]._parted) < 2:
        assert time.monotonic() < until_s, "a last word was passed over"
        time.sleep(0.001)
    late = [parting(job.ranks[rank], watches[rank]) for rank in (3, 0)]
    for thread in late:
        thread.start()
    for thread in (*early, *late):
        thread.join(60)
    assert all(comm.freed for comm in comms)
    assert job.network.sent == []


def test_a_last_word_that_never_comes_is_waited_for_no_longer_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.ulfm, "enabled", lambda: False)
    monkeypatch.setattr(Heartbeat, "every_s", 0.001)
    job = Job(20.0, ranks=3)
    comms: list[Any] = []
    watches = [Watch() for _ in job.ranks]
    for each, watch in zip(job.ranks, watches, strict=True):
        watch.begin(each)
        comms.append(each._comm)
    others = [parting(job.ranks[rank], watches[rank]) for rank in (0, 1)]  # rank 2's link is down
    for thread in others:
        thread.start()
    until_s = time.monotonic() + 30.0
    while 1 not in job.ranks[0]._parted:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert all(thread.is_alive() for thread in others)
    job.now_s += 21.0
    for thread in others:
        thread.join(30.0)
        assert not thread.is_alive()
    assert not comms[0].freed, "messages may still come"
    watches[2].close()


# -------------------------------------------------------------------------------------------------------------- the words


def test_the_last_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest silence first, and no more names than one can read."""
    comm: Any = Comm(Network(), 0, 9)
    left: list[int] = []
    monkeypatch.setattr(guard, "FORWARD_S", 0.0)
    monkeypatch.setattr(guard, "leave_within", lambda seconds: None)
    monkeypatch.setattr(heartbeat, "abort", lambda comm, status: left.append(status))
    monkeypatch.setattr(heartbeat.ulfm, "enabled", lambda: False)
    monkeypatch.setattr(heartbeat.ulfm, "end_job", lambda comm, status: None)
    hub = Heartbeat(comm, 60.0, lambda: "the way on")
    world: Any = SimpleNamespace(end=lambda ranks: None, hosts=["here"] * 9)
    hub.know(world, "learner {}".format)
    hub.end({2: 40.0, 3: 66.4, 4: 50.0, 5: 45.0, 6: 39.0})
    assert capsys.readouterr().err == (
        "mpisgd: learner 0 has heard nothing of learner 3, learner 4, learner 5 and 2 more for 66 s,"
        " longer than faults.patience_s = 60: a stopped process, no network to the rank, or code that lets no other thread run;"
        " the job is ended\nthe way on\n"
    )
    assert left == [1]
