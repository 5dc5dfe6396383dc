"""How a rank waits, on a clock that only sleeps and looks move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpisgd.comm import politeness
from mpisgd.comm.politeness import SLEEP_LEAST_S, SLEEP_MOST_S, YIELD_S, Politeness

LOOK_S = 2e-6


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What waits do: "yield", or the seconds of a sleep."""
    told: list[Any] = []
    now_s = [0.0]

    def perf_counter() -> float:
        now_s[0] += LOOK_S
        return now_s[0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        told.append(seconds)

    monkeypatch.setattr(politeness, "time", SimpleNamespace(perf_counter=perf_counter, sleep=sleep))
    monkeypatch.setattr(politeness, "os", SimpleNamespace(sched_yield=lambda: told.append("yield")))
    return told


def waited(polite: Politeness, looks: int, **most_s: float) -> Any:
    left = [looks]

    def ready() -> str | None:
        left[0] -= 1
        return "there" if left[0] < 0 else None

    return polite.until(ready, **most_s)


def test_what_is_there_is_not_waited_for(told: list[Any]) -> None:
    assert waited(Politeness(), 0) == "there"
    assert not told


def test_false_ends_a_wait_too() -> None:
    assert Politeness().until(lambda: False) is False


def test_first_it_spins_then_yields_then_sleeps_for_longer_and_longer(told: list[Any]) -> None:
    assert waited(Politeness(), 700) == "there"
    yields = told.count("yield")
    assert told[:yields] == ["yield"] * yields
    assert LOOK_S * yields == pytest.approx(YIELD_S, rel=0.05)
    sleeps = told[yields:]
    assert sleeps[0] == SLEEP_LEAST_S
    assert sleeps == sorted(sleeps)
    assert sleeps[-1] == SLEEP_MOST_S


@pytest.mark.parametrize("ranks", [0.5, 4.0, 15.5])
def test_the_more_ranks_share_a_core_the_sooner_it_sleeps(told: list[Any], ranks: float) -> None:
    waited(Politeness(ranks), 700)
    yields = told.count("yield")
    assert 0 < LOOK_S * yields <= YIELD_S / max(1.0, ranks)
    assert told[yields] == SLEEP_LEAST_S


def test_no_sleep_is_longer_than_it_may_be(told: list[Any]) -> None:
    waited(Politeness(15.0), 100, most_s=100e-6)
    assert max(each for each in told if each != "yield") == 100e-6
