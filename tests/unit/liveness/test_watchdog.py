"""The watchdog: one line when a wait is long, again after twice the time, and none while anything moves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mpisgd.comm.messages import Ending, Goodbye
from mpisgd.comm.waiting import Waiting
from mpisgd.exchange.roles import Roles
from mpisgd.liveness import watchdog
from mpisgd.liveness.watchdog import Watchdog, of_shard
from mpisgd.protocols import HardsyncOptions
from tests.unit.fakes import Stuck
from tests.unit.shards import Served, pulls, push


class Rank(Waiting):
    """Something that waits, on a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.said: list[str] = []

    def watchdog(self, quiet_s: float) -> Watchdog:
        return Watchdog(
            self, quiet_s, "learner 1", lambda: f"waits for {self.awaited}", now_s=lambda: self.now_s, say=self.said.append
        )

    def look(self, watchdog: Watchdog, seconds: int) -> list[str]:
        """What it says in so many seconds."""
        for _ in range(seconds):
            self.now_s += 1.0
            watchdog.look()
        said = list(self.said)
        self.said.clear()
        return said


def test_a_long_wait_is_told_again_after_twice_the_time() -> None:
    rank = Rank()
    watchdog = rank.watchdog(10.0)
    rank.awaited = "shard 0"
    assert rank.look(watchdog, 1 + 9) == []
    assert rank.look(watchdog, 1) == ["mpisgd: nothing has moved for 10 s: learner 1 waits for shard 0"]
    assert rank.look(watchdog, 9) == []
    assert rank.look(watchdog, 30) == [
        "mpisgd: nothing has moved for 20 s: learner 1 waits for shard 0",
        "mpisgd: nothing has moved for 40 s: learner 1 waits for shard 0",
    ]
    rank.waits += 1
    assert rank.look(watchdog, 1 + 9) == [], "another wait"
    assert len(rank.look(watchdog, 1)) == 1


def test_who_moves_or_computes_is_left_alone() -> None:
    rank = Rank()
    watchdog = rank.watchdog(10.0)
    assert rank.look(watchdog, 100) == [], "it does not wait"
    for _ in range(30):
        rank.waits += 1
        rank.awaited = "shard 0"
        assert rank.look(watchdog, 9) == []


def test_a_line_that_nobody_reads_holds_up_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a terminal that is stopped: the heartbeat is in the same thread."""
    read, said = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog, "warn", lambda text: (said.set(), read.wait(60.0)))
    rank = Rank()
    rank.awaited = "shard 0"
    looks = watchdog.Watchdog(rank, 10.0, "learner 1", lambda: "waits", now_s=lambda: rank.now_s)
    looking = threading.Thread(target=rank.look, args=(looks, 30), daemon=True)
    looking.start()
    looking.join(30.0)
    assert not looking.is_alive() and said.wait(30.0)
    read.set()


def test_zero_is_never() -> None:
    rank = Rank()
    assert not rank.watchdog(0.0).begin()


def test_a_shard_says_whom_it_waits_for_and_who_waits_for_it(tmp_path: Path) -> None:
    script = [*pulls(0, 1), (push(0), 1.0), *pulls(0, clock=1), Goodbye(2, 0, Ending.NONE)]
    served = Served(tmp_path / "log.h5", script, HardsyncOptions(), 4)
    shard = served.shard
    shard.begin()
    try:
        while True:
            shard.serve_one()
    except Stuck:
        pass
    roles = Roles((0,), (1, 2, 3, 4), 1)
    hosts = ["a", "a", "b", "b", "c"]
    text = of_shard(shard, roles, hosts)
    since_s = served.channel.seconds - shard.answering.given[1][1]
    assert text == (
        f"at clock 0 waits for learner 1 (rank 2 on b), which was given clock 0 {since_s:.0f} s ago: computing or"
        " gone; learner 3 (rank 4 on c), which has not asked for weights yet; learner 0 (rank 1 on a) waits for this shard, for"
        " clock 1 or later"
    )
    shard.rules.present.clear()
    assert of_shard(shard, roles, hosts) == "at clock 0 waits for the evaluator (rank 1 on a), for all learners have left"
    served.snapshots.close()
