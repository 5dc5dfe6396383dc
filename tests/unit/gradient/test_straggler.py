"""Stragglers put in on purpose: a pure function of (seed, learner, seq), with the means and factors that were asked for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpisgd.config import StragglerOptions
from mpisgd.gradient.straggler import Delays


def delays(learner_id: int = 0, seed: int = 1, **fields: Any) -> Delays:
    return Delays(StragglerOptions(**fields), seed, learner_id)


KINDS = [("normal", 0.2), ("exponential", 1.0), ("lognormal", 0.5), ("pareto", 3.0)]


@pytest.mark.parametrize(("delay", "spread"), KINDS)
def test_a_delay_depends_on_its_names_alone(delay: str, spread: float) -> None:
    """Whatever was asked before, and in whatever order: so a run can be replayed and resumed."""
    names = [(seed, learner_id, seq) for seed in range(3) for learner_id in range(3) for seq in range(20)]
    drawn = {}
    for seed, learner_id, seq in names:
        drawn[seed, learner_id, seq] = delays(learner_id, seed, delay=delay, delay_spread=spread).of(seq, 0.1)
    again = delays(1, 2, delay=delay, delay_spread=spread)
    for seq in random.Random(0).sample(range(20), 20):
        assert again.of(seq, 0.1) == drawn[2, 1, seq]
    assert len(set(drawn.values())) == len(names)


@pytest.mark.parametrize(("delay", "spread"), [("constant", 1.0), *KINDS])
@pytest.mark.parametrize("probability", [1.0, 0.25])
def test_the_mean_is_what_was_asked_for(delay: str, spread: float, probability: float) -> None:
    some = delays(delay=delay, delay_spread=spread, delay_mean_s=0.02, delay_probability=probability)
    drawn = np.array([some.of(seq, 0.1) for seq in range(5000)])
    assert (drawn >= 0).all()
    assert np.count_nonzero(drawn) / len(drawn) == pytest.approx(probability, rel=0.1)
    assert drawn.mean() == pytest.approx(0.02 * probability, rel=0.1)


def test_the_spread_is_what_was_asked_for() -> None:
    """normal: deviation over mean; lognormal: deviation of the logarithm; pareto: share beyond ten means, x^-shape."""
    drawn = {
        kind: np.array([delays(delay=kind, delay_spread=spread, delay_mean_s=1.0).of(seq, 0.0) for seq in range(4000)])
        for kind, spread in [("normal", 0.2), ("lognormal", 0.5), ("pareto", 2.0)]
    }
    assert drawn["normal"].std() == pytest.approx(0.2, rel=0.1)
    assert np.log(drawn["lognormal"]).std() == pytest.approx(0.5, rel=0.1)
    assert np.mean(drawn["pareto"] > 10.0) == pytest.approx((1 + 10.0) ** -2.0, rel=0.3)


@pytest.mark.parametrize(("learner_id", "delay_s"), [(0, 0.0), (1, 0.1), (2, 0.25)])
def test_a_slow_learner_takes_its_factor_as_long(learner_id: int, delay_s: float) -> None:
    some = delays(learner_id, slowdown={1: 2.0, 2: 3.5})
    assert [some.of(seq, 0.1) for seq in range(3)] == pytest.approx([delay_s] * 3)


def test_a_slow_learner_is_slow_in_its_delays_too() -> None:
    """(work + delay) times the factor, less the work that it has really done."""
    assert delays(1, slowdown={1: 3.0}, delay="constant", delay_mean_s=0.5).of(0, 0.1) == pytest.approx(3 * 0.6 - 0.1)


def test_one_learner_pauses_now_and_then() -> None:
    pausing, other = (delays(learner_id, pause_learner=2, pause_every=4, pause_s=1.5) for learner_id in (2, 0))
    assert [pausing.of(seq, 0.1) for seq in range(9)] == [0, 0, 0, 1.5, 0, 0, 0, 1.5, 0]
    assert not any(other.of(seq, 0.1) for seq in range(9))


def test_nothing_is_put_in_by_default() -> None:
    assert delays().of(0, 10.0) == 0.0


@pytest.mark.parametrize("deviation_s", [0.01, 0.0, pytest.param(0.04, marks=pytest.mark.slow)])
def test_the_rest_of_a_cycle_is_not_slowed_down(deviation_s: float) -> None:
    """It has the mean and deviation that were asked for, is drawn by its names, and apart from the injected delay."""
    slow = {"slowdown": {0: 5.0}, "delay": "exponential", "delay_mean_s": 0.05}
    without, beside = delays(**slow), delays(**slow, rest_mean_s=0.02, rest_deviation_s=deviation_s)
    draws = range(20_000 if deviation_s else 200)
    injected = np.array([without.of(seq, 0.1) for seq in draws])
    rest = np.array([beside.of(seq, 0.1) for seq in draws]) - injected
    assert (rest > 0).all()
    assert rest.mean() == pytest.approx(0.02, rel=0.05)
    assert rest.std() == pytest.approx(deviation_s, rel=0.25, abs=1e-9), "of 20,000 with a heavy tail"
    assert rest[77] == pytest.approx(delays(rest_mean_s=0.02, rest_deviation_s=deviation_s).of(77, 3.0))
    if deviation_s:
        assert abs(np.corrcoef(rest, injected)[0, 1]) < 0.05
        assert rest[1] != pytest.approx(delays(1, rest_mean_s=0.02, rest_deviation_s=deviation_s).of(1, 0.1))
