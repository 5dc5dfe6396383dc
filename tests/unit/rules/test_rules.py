"""What a shard decides whatever its protocol (`rules/rules.py`), by hand: turns, repeats, the end, signals, who is there."""

from __future__ import annotations

import math

import pytest

from mpisgd.comm.messages import NOT_OVER
from mpisgd.protocols import AsyncOptions, BackupOptions, HardsyncOptions, ProtocolOptions, SoftsyncOptions, VersionedOptions
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Rules
from tests.unit.tracing import Traced, disagreements

#: Title -> (learners, protocol, samples of the run, trace); each gradient is of one sample.
TRACES: dict[str, tuple[int, ProtocolOptions, float, str]] = {
    "a gradient is kept until its turn, and pulls wait for the update": (
        3,
        HardsyncOptions(),
        6,
        """
        push 2 @0    -> park
        pull 2 >=1   -> wait
        push 0 @0    -> apply 1
        pull 0 >=1   -> wait
        whose        -> 1
        push 1 @0    -> apply 1, 2: apply 1, update 1, weights 2, weights 0
        pull 1 >=1   -> weights 1
        push 0 @1    -> apply 1
        pull 0 >=2   -> wait
        push 1 @1    -> apply 1
        push 2 @1    -> apply 1, update 2, stop 0
        pull 1 >=2   -> stop
        push 1 @2    -> late
        bye 0        -> -
        bye 1        -> -
        bye 2        -> finished
        """,
    ),
    "staleness is measured when a gradient is summed": (
        2,
        SoftsyncOptions(n=2),
        math.inf,
        """
        push 0 @0    -> apply 1, update 1
        push 1 @0    -> apply 1, update 2
        push 1 @0    -> apply 0.5, update 3
        """,
    ),
    "a mini-batch is applied once, and repeated it counts": (
        2,
        VersionedOptions(grads_to_wait=2),
        math.inf,
        """
        push 0 @0 #0 -> apply 1
        push 1 @0 #0 -> apply 1, update 1
        push 0 @1 #0 -> drop REPEATED
        push 1 @0 #1 -> reject
        push 1 @1 #1 -> apply 1, update 2
        bad 0 @2 #1  -> -
        push 0 @2 #1 -> apply 1, update 3
        """,
    ),
    "after the end nothing is used, and what was applied is still a repeat": (
        2,
        AsyncOptions(),
        1,
        """
        push 0 @0 #0 -> apply 1, update 1
        push 0 @0 #0 -> drop REPEATED
        bad 1 @0 #0  -> late
        torn 1 @1    -> drop TORN
        pull 1 >=0   -> stop
        interrupt    -> -
        """,
    ),
    "at each departure the others are looked at again": (
        3,
        HardsyncOptions(),
        math.inf,
        """
        push 0 @0    -> apply 1
        pull 0 >=1   -> wait
        push 1 @0    -> apply 1
        pull 1 >=1   -> wait
        leave 2      -> update 1, weights 0, weights 1
        push 1 @1    -> park
        pull 1 >=2   -> wait
        leave 0      -> 1: apply 1, update 2, weights 1
        leave 1      -> finished
        """,
    ),
    "whoever may join is found when another leaves": (
        2,
        AsyncOptions(warm_up=100),
        math.inf,
        """
        pull 1 >=0   -> wait
        pull 0 >=0   -> weights 0
        leave 0      -> weights 1
        """,
    ),
    "one that hangs is not waited for until it is back": (
        3,
        HardsyncOptions(),
        math.inf,
        """
        pull 2 >=0   -> weights 0
        push 0 @0    -> apply 1
        push 1 @0    -> apply 1
        pull 1 >=1   -> wait
        miss 2       -> update 1, weights 1
        push 2 @0    -> drop MISSED
        push 0 @1    -> apply 1
        pull 2 >=1   -> weights 1
        push 1 @1    -> apply 1
        whose        -> 2
        push 2 @1    -> apply 1, update 2
        miss 2       -> -
        push 0 @2    -> apply 1
        push 2 @2    -> park
        push 1 @2    -> apply 1, 2: apply 1, update 3
        """,
    ),
    "what one that hangs had pushed, whole, counts": (
        3,
        HardsyncOptions(),
        math.inf,
        """
        push 2 @0    -> park
        miss 2       -> 2: apply 1
        push 0 @0    -> apply 1
        push 1 @0    -> apply 1, update 1
        """,
    ),
    "the gradient of one that is dead counts whole, and not in part": (
        3,
        HardsyncOptions(),
        math.inf,
        """
        torn 1 @0    -> drop TORN
        lose 1       -> -
        push 2 @0    -> park
        lose 2       -> 2: apply 1
        push 0 @0    -> apply 1, update 1
        lose 0       -> finished
        """,
    ),
    "a shard that others have left behind does not wait for what will not come": (
        2,
        HardsyncOptions(),
        math.inf,
        """
        push 0 @0    -> apply 1
        owing 1 >=1  -> wait, passes, update 1, weights 1
        push 0 @1    -> apply 1
        pull 0 >=2   -> wait
        owing 1 >=2  -> wait, passes, update 2, weights 0, weights 1
        """,
    ),
    "without lockstep it may simply be slower: until it misses one itself, it waits": (
        3,
        BackupOptions(b=1),
        math.inf,
        """
        push 0 @0    -> apply 1
        owing 1 >=1  -> wait
        push 2 @0    -> apply 1, update 1, weights 1
        """,
    ),
    "a signal: nobody is given weights, and what all have pushed still counts": (
        2,
        SoftsyncOptions(n=1),
        math.inf,
        """
        push 0 @0     -> apply 1
        pull 1 >=1    -> wait
        interrupt     -> in time, stop 1
        interrupt     -> -
        push 1 @0     -> apply 1, update 1
        pull 0 >=0    -> stop
        interrupted 0 -> -
        interrupted 1 -> -
        """,
    ),
    "a signal: an ordered sum whose turn has left is left as it is": (
        3,
        HardsyncOptions(),
        math.inf,
        """
        push 2 @0     -> park
        interrupt     -> in time
        interrupted 0 -> -
        whose         -> None
        push 1 @0     -> leave
        interrupted 2 -> -
        interrupted 1 -> -
        """,
    ),
    "those who compute from older weights are told once": (
        3,
        BackupOptions(N=1, abort=True),
        math.inf,
        """
        pull 0 >=0   -> weights 0
        pull 1 >=0   -> weights 0
        push 0 @0    -> apply 1, update 1
        late         -> 1
        push 0 @1    -> apply 1, update 2
        late         -> -
        pull 1 >=1   -> weights 2
        late         -> -
        """,
    ),
}


@pytest.mark.parametrize("title", TRACES)
def test_every_decision_of_a_trace(title: str) -> None:
    lambda_, options, budget, text = TRACES[title]
    assert disagreements(text, Traced(options.make(lambda_), lambda_, budget).decide) == []


def test_only_those_who_were_not_waited_for_may_have_old_weights() -> None:
    rules = Rules(HardsyncOptions().make(2), 2, math.inf)
    assert rules.must_be_fresh(0)
    rules.membership.on_departure(0, Gone.MISSED)
    assert not rules.must_be_fresh(0)
    assert not Rules(BackupOptions().make(2), 2, math.inf).must_be_fresh(0), "a late gradient is no mistake"


def test_a_learner_heard_for_this_update_is_not_awaited_again_once_back() -> None:
    rules = Rules(HardsyncOptions().make(2), 2, math.inf)
    assert rules.judge(0, 0, 0).weight == 1.0
    rules.membership.on_departure(0, Gone.MISSED)
    rules.membership.on_return(0)
    rules.membership.on_departure(1, Gone.MISSED)
    assert rules.update_due(), "its push is in the sum"


def test_a_torn_push_of_a_missed_learner_is_not_awaited_again_once_back() -> None:
    """It goes on: of this clock nothing more comes."""
    for timestamp, due in ((0, True), (-1, False)):
        rules = Rules(HardsyncOptions().make(2), 2, math.inf)
        rules.membership.on_departure(0, Gone.MISSED)
        rules.on_torn(0, timestamp, 0)
        rules.membership.on_departure(1, Gone.LOST)
        assert not rules.update_due()
        rules.membership.on_return(0)
        assert rules.update_due() is due


@pytest.mark.parametrize(
    ("options", "clock", "over"),
    [
        (AsyncOptions(), 1, True),
        (AsyncOptions(), NOT_OVER, True),
        (HardsyncOptions(), 1, False),
        (HardsyncOptions(), NOT_OVER, False),
        (HardsyncOptions(), 0, True),
    ],
)
def test_another_shards_end_is_the_end_at_its_clock_or_where_clocks_may_differ(
    options: ProtocolOptions, clock: int, over: bool
) -> None:
    rules = Rules(options.make(1), 1, math.inf)
    rules.membership.on_departure(0, Gone.LOST)
    assert not rules.membership.is_over
    rules.membership.on_end_elsewhere(clock)
    assert rules.membership.is_over is over


def test_a_missed_learner_stopped_by_another_shard_has_left_only_once() -> None:
    rules = Rules(BackupOptions(N=2).make(3), 3, math.inf)
    rules.membership.on_departure(0, Gone.MISSED)
    rules.membership.on_departure(0, Gone.STOPPED)
    for learner_id in (1, 2):
        rules.waiting[learner_id] = 1
    assert rules.membership.stuck
    assert rules.membership.release_stopped() == []


def test_a_run_that_a_signal_cut_short_is_not_finished() -> None:
    for gone, finished in ((Gone.INTERRUPTED, False), (Gone.LOST, False), (Gone.STOPPED, True)):
        rules = Rules(AsyncOptions().make(1), 1, math.inf)
        rules.on_interrupt()
        rules.membership.on_departure(0, gone)
        assert not rules.present | rules.absent
        assert rules.membership.end_if_deserted()
        assert rules.finished is finished


def test_a_missed_learner_does_not_hold_up_the_end_by_a_signal() -> None:
    rules = Rules(AsyncOptions().make(2), 2, math.inf)
    rules.membership.on_departure(0, Gone.MISSED)
    rules.on_interrupt()
    rules.membership.on_departure(1, Gone.LOST)
    assert rules.membership.end_if_deserted()
    assert not rules.finished, "another attempt goes on"


def test_rules_go_on_from_a_checkpoint() -> None:
    rules = Rules(AsyncOptions().make(2), 2, math.inf)
    rules.resume(7, [3, 4], [3, 5], [4, 4])
    assert not rules.is_wanted(1, 4)
    assert rules.is_wanted(1, 5), "what was dropped may be applied"
    assert rules.judge(1, 7, 5).weight == 1.0
    assert (rules.applied_seq, rules.dropped_seq) == ([3, 5], [3, 5])
