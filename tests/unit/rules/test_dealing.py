"""The dealing of portions: a trace worked out by hand, and random evaluations in which learners die."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import ProtocolError
from mpisgd.rules.portions import Dealing
from tests.effort import examples


def test_a_trace_worked_out_by_hand() -> None:
    """Five portions, three learners; learner 2 is slow, and dies."""
    dealing = Dealing(5, duplicates=True)
    assert [dealing.ask(learner) for learner in (0, 1, 2)] == [0, 1, 2]
    assert dealing.done(1, 1)
    dealing.commit(1, 1)
    assert dealing.first == 0
    assert dealing.ask(1) == 3
    assert dealing.done(0, 0)
    assert dealing.ask(0) == 4
    assert dealing.exhausted
    dealing.commit(0, 0)
    assert dealing.first == 2
    assert dealing.done(3, 1)
    assert dealing.ask(1) == 2  # the slowest, a second time: dealt before portion 4
    assert dealing.is_copy(2, 1)
    assert dealing.done(4, 0)
    assert dealing.ask(0) is None  # portion 2 has two already
    assert dealing.done(2, 1)
    assert not dealing.done(2, 2)  # too late: the first result counts
    assert dealing.ask(2) is None
    dealing.commit(3, 1)
    dealing.commit(2, 1)
    assert dealing.lost(2) == []
    assert dealing.lost(0) == [4]  # claimed, but not in the sum
    assert dealing.ask(1) == 4
    assert dealing.done(4, 1)
    assert not dealing.complete
    dealing.commit(4, 1)
    assert dealing.complete


def test_no_portion_is_dealt_twice_without_duplicates() -> None:
    dealing = Dealing(2, duplicates=False)
    assert [dealing.ask(learner) for learner in (0, 1, 2)] == [0, 1, None]


def test_portions_are_not_dealt_far_ahead_of_the_first_that_is_missing() -> None:
    dealing = Dealing(9, duplicates=True, ahead=2)
    assert [dealing.ask(learner) for learner in (0, 1)] == [0, 1]
    assert dealing.done(1, 1)
    assert dealing.exhausted
    assert dealing.ask(1) == 0  # what all wait for
    assert dealing.done(0, 1)
    dealing.commit(0, 1)
    dealing.commit(1, 1)
    assert dealing.ask(1) == 2


def test_what_cannot_be_is_refused() -> None:
    dealing = Dealing(2, duplicates=True)
    with pytest.raises(ProtocolError, match="portion 0, not dealt to this learner"):
        dealing.done(0, 0)
    assert dealing.ask(0) == 0
    assert dealing.ask(1) == 1
    assert dealing.done(1, 1)
    assert dealing.lost(1) == [1]
    with pytest.raises(ProtocolError, match="portion 1 of learner 1 is to be summed, but does not count"):
        dealing.commit(1, 1)
    with pytest.raises(ProtocolError, match="is to be summed, but does not count"):
        dealing.commit(0, 0)


@pytest.mark.deeper
@settings(max_examples=examples(1000), deadline=None)
@given(seed=st.integers(0, 2**32), portions=st.integers(1, 24), learners=st.integers(1, 8), duplicates=st.booleans())
def test_each_portion_is_committed_exactly_once(seed: int, portions: int, learners: int, duplicates: bool) -> None:
    """Whoever is slow, or dies; and while any is missing, somebody has something to do."""
    drawn = random.Random(seed)
    ahead = drawn.choice([math.inf, 1, 3])
    dealing = Dealing(portions, duplicates=duplicates, ahead=ahead)
    present, computing = list(range(learners)), dict[int, int]()
    claimed, committed = list[tuple[int, int]](), list[int]()
    while not dealing.complete:
        learner_id = drawn.choice(present)
        if claimed and drawn.random() < 0.5:
            portion, whose = claimed.pop(drawn.randrange(len(claimed)))
            dealing.commit(portion, whose)
            committed.append(portion)
        elif len(present) > 1 and drawn.random() < 0.1:
            present.remove(learner_id)
            computing.pop(learner_id, None)
            claimed = [each for each in claimed if each[1] != learner_id]
            dealing.lost(learner_id)
        elif learner_id in computing:
            portion = computing.pop(learner_id)
            if dealing.done(portion, learner_id):
                claimed.append((portion, learner_id))
        elif (dealt := dealing.ask(learner_id)) is not None:
            assert dealt < dealing.first + ahead
            computing[learner_id] = dealt
        else:
            assert computing or claimed, "everybody waits for nothing"
    assert sorted(committed) == list(range(portions))
