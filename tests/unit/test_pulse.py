"""Whether a shard lives: who is asked when, who answers, and how long a silence must be. The network is a list."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mpisgd.pulse import LEAST_S, Pulse
from tests.unit.fakes import Status


@pytest.fixture(autouse=True)
def _without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Status=Status, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=1, Exception=OSError)
    monkeypatch.setitem(sys.modules, "mpisgd.mpi", SimpleNamespace(MPI=mpi))


class Network:
    """Messages that have been sent, and not taken."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []


class Comm:
    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def Get_rank(self) -> int:
        return self.rank

    def Isend(self, body: bytearray, rank: int, tag: int) -> Any:
        self.network.sent.append((self.rank, rank))
        return SimpleNamespace(Test=lambda: True)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        for at, (sender, to) in enumerate(self.network.sent):
            if to == self.rank:
                del self.network.sent[at]
                status.source, status.nbytes = sender, 1
                return SimpleNamespace(Recv=lambda into: None)
        return None


class Job:
    """Shards 0 and 1, a learner on rank 2."""

    def __init__(self, patience_s: float) -> None:
        self.network, self.now_s = Network(), 100.0
        self.ended: list[tuple[int, float]] = []
        self.waits = SimpleNamespace(awaited=None, patient=False, waits=0)
        self.learner, *self.shards = (self.pulse(rank, patience_s) for rank in (2, 0, 1))

    def pulse(self, rank: int, patience_s: float) -> Pulse:
        comm: Any = Comm(self.network, rank)
        return Pulse(
            comm,
            self.waits,
            (0, 1),
            patience_s,
            lambda rank, silent_s: self.ended.append((rank, silent_s)),
            now_s=lambda: self.now_s,
        )

    def go_on(self, seconds: int, *, living: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.learner.beat()
            for shard in living:
                self.shards[shard].beat()


def test_one_that_does_not_wait_asks_nobody() -> None:
    job = Job(20.0)
    job.go_on(100, living=())
    assert job.network.sent == []
    assert job.ended == []


@pytest.mark.parametrize(("awaited", "patient"), [("the answer", False), (None, True)])
def test_who_lives_may_be_waited_for_for_ever(awaited: str | None, patient: bool) -> None:
    job = Job(20.0)
    job.waits.awaited, job.waits.patient = awaited, patient
    job.go_on(1000)
    assert job.ended == []


def test_one_that_hangs_is_told_of_when_its_silence_has_lasted() -> None:
    job = Job(20.0)
    job.waits.awaited = "the answer"
    job.go_on(50)
    job.go_on(20, living=(0,))
    assert job.ended == []
    job.go_on(8, living=(0,))
    assert {rank for rank, _ in job.ended} == {1}
    assert 20.0 < job.ended[0][1] <= 22.0


def test_a_wait_that_is_over_begins_anew() -> None:
    job = Job(20.0)
    job.waits.awaited = "the answer"
    for _ in range(10):
        job.go_on(15, living=(0,))
        job.waits.waits += 1
    assert job.ended == []


def test_one_that_was_stopped_itself_blames_nobody() -> None:
    job = Job(20.0)
    job.waits.awaited = "the answer"
    job.go_on(10)
    job.now_s += 10_000.0
    job.go_on(10)
    assert job.ended == []


def test_no_silence_is_too_short() -> None:
    job = Job(0.1)
    job.waits.awaited = "the answer"
    job.go_on(int(LEAST_S), living=())
    assert job.ended == []
    job.go_on(3, living=())
    assert {rank for rank, _ in job.ended} == {0, 1}
