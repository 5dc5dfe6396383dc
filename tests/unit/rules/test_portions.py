"""Portions of a run, dealt to learners: a trace worked out by hand, and random schedules in which each is applied once."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.data.sampling import DealtSampling, EpochSampling
from mpisgd.rules.portions import LEASE, Portions
from mpisgd.serving.refusals import Refusals
from tests.effort import examples


def test_a_trace_worked_out_by_hand() -> None:
    portions = Portions(6, 3, deals=True)
    assert [portions.of(learner) for learner in (2, 0, 1)] == [0, 1, 2], "who asks first"
    assert portions.of(2) == 0, "it has it still"
    portions.apply(0)
    assert portions.of(2) == 3
    portions.drop(1, 0)  # too stale
    portions.lost(1)  # portion 2
    assert [portions.of(learner) for learner in (2, 0, 1)] == [3, 1, 2], "what was given back, the first first"
    portions.lost(1)
    assert portions.of(0) == 1
    portions.apply(2)  # it had only been missed: its result comes all the same
    assert portions.of(1) == 4
    portions.apply(1)
    assert portions.of(0) == 5
    assert portions.state() == [3]
    portions.apply(4)
    assert portions.state() == [5, 3]
    assert portions.of(1) == 3, "none is left: what has been under way for longest is dealt once more"
    portions.apply(3)
    assert portions.of(2) == 5
    assert portions.has(3)
    assert not portions.has(5)
    portions.drop(3, 1)  # its copy came too late
    portions.drop(5, 0)
    portions.drop(5, 2)
    assert portions.of(1) == 5
    portions.apply(5)
    assert portions.complete
    assert portions.state() == [6]


def test_an_overdue_portion_is_dealt_once_more_for_each_lease() -> None:
    portions, dealt = Portions(1000, 2, deals=True), list[int]()
    assert portions.of(0) == 0
    while dealt.count(0) < 2:
        portion = portions.of(1)
        dealt.append(portion)
        if portion:
            portions.apply(portion)
        else:
            portions.drop(portion, 1)  # in vain, too
    first = 2 * LEASE
    assert dealt[: first + 1] == [*range(1, first + 1), 0]
    assert dealt[first + 1 :] == [*range(first + 1, 2 * first + 1), 0]


def test_it_goes_on_where_it_was() -> None:
    before = Portions(20, 3, deals=True)
    for learner in (0, 1, 2):
        before.of(learner)
    before.apply(2)
    after = Portions(20, 3, deals=True)
    after.of(0)
    after.restore(before.state())
    assert [after.of(learner) for learner in (0, 1, 2)] == [0, 1, 3]


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_each_is_applied_once_whatever_happens(total: int, lambda_: int, seed: int) -> None:
    """Learners die, are missed and back, their gradients are dropped and torn, the run is killed and gone on with."""
    dice, portions, applied = random.Random(seed), Portions(total, lambda_, deals=True), Counter[int]()
    computing: dict[int, int] = {}
    for _ in range(200 * total):
        if portions.complete:
            break
        learner = dice.randrange(lambda_)
        match dice.choice(("pull", "pull", "push", "push", "push", "drop", "lost", "resume" if dice.random() < 0.05 else "pull")):
            case "pull":
                computing[learner] = portions.of(learner)
                assert 0 <= computing[learner] < total
            case "push" if learner in computing:  # perhaps given back long ago
                portion = computing.pop(learner)
                if portions.has(portion):
                    portions.drop(portion, learner)
                else:
                    applied[portion] += 1
                    portions.apply(portion)
            case "drop" if learner in computing:
                portions.drop(computing.pop(learner), learner)
            case "lost":
                portions.lost(learner)
            case "resume":
                computing.clear()
                state = portions.state()
                portions = Portions(total, lambda_, deals=True)
                portions.restore(state)
    assert portions.complete
    assert applied == Counter(range(total))


def test_a_portion_is_a_function_of_its_number() -> None:
    """Of the order of the epoch that one learner alone would go through; in parts, where a push is of several mini-batches."""
    dealt, alone = DealtSampling(50, 4, 3, seed=7, count=2), EpochSampling(50, 8, 1, seed=7)
    for learner_id, seq, portion in ((0, 0, 3), (2, 5, 3), (1, 8, 11)):
        dealt.deal(learner_id, portion)
        parts = [dealt.indices(learner_id, 2 * seq + part) for part in range(2)]
        assert np.concatenate(parts).tolist() == alone.indices(0, portion).tolist()
    every = np.concatenate([alone.indices(0, portion) for portion in range(25)])
    assert np.bincount(every).tolist() == [4] * 50


@pytest.mark.parametrize("portion", [-1, 4])
def test_a_portion_that_is_none_is_refused(portion: int) -> None:
    refusals = Refusals(1)
    refusals.portions = 4
    pushed: Any = SimpleNamespace(learner_id=0, timestamp=0, seq=0, samples=1, portion=portion)
    assert refusals.why_not(pushed, 0, False) == f"learner 0 pushed portion {portion}: expected 0 ... 3"
    pushed.portion = 3
    assert refusals.why_not(pushed, 0, False) == ""
