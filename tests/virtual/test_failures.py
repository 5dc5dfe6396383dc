"""Failures of virtual learners: at given seconds, or drawn as functions of names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import MpisgdError
from mpisgd.config.config_virtual import FailureOptions
from mpisgd.simulate.failures import Failures, LearnerFailed


def moments(*, lambda_: int = 4, seed: int = 1, **fields: Any) -> list[int | None]:
    """Nanosecond of every learner's failure."""
    failures = Failures(FailureOptions(**fields), seed)
    return [failures.nanosecond_of(learner_id) for learner_id in range(lambda_)]


def test_they_live_for_ever_by_default() -> None:
    assert moments() == [None] * 4


def test_at_given_seconds() -> None:
    assert moments(at_s={1: 2.5, 3: 0.0}) == [None, 2_500_000_000, None, 0]


def test_lives_are_exponential() -> None:
    drawn = 1e-9 * np.array(moments(lambda_=5000, mean_s=20.0), float)
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(20.0, rel=0.05)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([2.107, 13.863, 46.05], rel=0.1)


def test_a_life_depends_on_its_names_alone() -> None:
    few, many, other = (moments(lambda_=lambda_, seed=seed, mean_s=20.0) for lambda_, seed in ((4, 1), (9, 1), (9, 2)))
    assert few == many[:4]
    assert len({*many, *other}) == 18
    failures = Failures(FailureOptions(mean_s=20.0), 1)
    assert [failures.nanosecond_of(learner_id) for learner_id in (5, 2, 5)] == [many[5], many[2], many[5]]


def test_the_earlier_of_both_counts() -> None:
    drawn = moments(mean_s=20.0)
    assert moments(mean_s=20.0, at_s={0: 1e-9, 2: 1e9}) == [1, *drawn[1:]]


def test_the_exception_says_who_and_when() -> None:
    error = LearnerFailed(3, 1_500_000_000)
    assert isinstance(error, MpisgdError)
    assert (error.learner_id, error.now_ns) == (3, 1_500_000_000)
    assert str(error) == "learner 3 failed at 1.5 s of virtual time"
