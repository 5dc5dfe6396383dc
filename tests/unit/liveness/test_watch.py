"""The one watch of a rank: each look in its time, none after its end, and none that takes others along."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from mpisgd.liveness.watch import Look, Watch


class Counted(Look):
    every_s = 0.001

    def __init__(self, then: Callable[[Counted], None] = lambda look: None, begins: bool = True) -> None:
        super().__init__()
        self.count = 0
        self._then, self._begins = then, begins

    def begin(self) -> bool:
        return self._begins

    def look(self) -> None:
        self.count += 1
        self._then(self)


def until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_each_look_in_its_own_time() -> None:
    often, seldom, never = Counted(), Counted(), Counted(begins=False)
    seldom.every_s = 60.0
    with Watch() as watch:
        for look in (often, seldom, never):
            watch.begin(look)
        until(lambda: often.count > 10)
    assert (seldom.count, never.count) == (1, 0)


def test_without_a_look_there_is_no_thread() -> None:
    before = threading.active_count()
    with Watch() as watch:
        watch.begin(Counted(begins=False))
        assert threading.active_count() == before


def test_no_look_ends_after_its_end() -> None:
    """A rank that goes on must not be ended by a look that waits."""
    ended: list[str] = []

    def waits(look: Counted) -> None:
        if not look.over.wait(30.0):
            ended.append("the job")

    look, other = Counted(waits), Counted()
    with Watch() as watch:
        watch.begin(look)
        until(lambda: look.count > 0)
        watch.end(look)
        watch.begin(other)
        until(lambda: other.count > 2)
    count = other.count
    time.sleep(0.01)
    assert ended == []
    assert (look.count, other.count) == (1, count), "none after the end"


def test_a_look_that_fails_is_the_last_of_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(look: Counted) -> None:
        raise OSError("no such rank")

    bad, good = Counted(fails), Counted()
    with Watch() as watch:
        watch.begin(bad)
        watch.begin(good)
        until(lambda: good.count > 5)
    assert bad.count == 1
    until(lambda: "OSError: no such rank" in capsys.readouterr().err)


def test_words_that_nobody_reads_hold_up_no_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a terminal that is stopped."""
    read = threading.Event()
    monkeypatch.setattr(sys, "excepthook", lambda *told: read.wait(60.0))
    good = Counted()
    with Watch() as watch:
        watch.begin(Counted(lambda look: 1 / 0))
        watch.begin(good)
        until(lambda: good.count > 5)
    read.set()
