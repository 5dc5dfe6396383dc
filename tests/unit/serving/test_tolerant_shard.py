"""A shard whose learners die, or hang: what the protocol is told, what the log says, who evaluates (DESIGN 4, laws 2, 4)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm import messages
from mpisgd.comm.messages import FINAL, Ending, Goodbye, Lost, Message, Push, SnapshotPull, Torn
from mpisgd.protocols import (
    AsyncOptions,
    SoftsyncOptions,
    VersionedOptions,
)
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.vectors.body import Pool
from tests.unit.shards import EVALUATOR, LEAVE, ScriptedChannel, byes, now, pulls, push
from tests.unit.shards import tolerant_serve as serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


# ------------------------------------------------------------------------------------------------------------------- dead


def test_hardsync_goes_on_with_one_less(log: Path) -> None:
    done = serve(log, [*pulls(0, 1, 2), (now(0), 1.0), (now(1), 2.0), Lost(3, 2), *pulls(0, 1, clock=1), *byes({0: 1, 1: 1})])
    assert done.weights == [-1.5], "the divisor is counted"
    assert done.told(Event.LOST) == [(Event.LOST, 0, 2)]
    assert done.rows("updates", "clock", "gradients", "samples") == [(1, 2, 4)]
    assert done.balanced()


def test_a_whole_gradient_counts_though_its_learner_is_dead(log: Path) -> None:
    """Kept until its turn, it is summed, in the order of learners as far as it can be."""
    done = serve(log, [*pulls(0, 1), (now(1), 3.0), Lost(2, 1), (now(0), 1.0), *pulls(0, clock=1), *byes({0: 1})], lambda_=2)
    assert done.weights == [-2.0]
    assert done.balanced()


def test_a_whole_gradient_counts_though_its_learner_hangs(log: Path) -> None:
    """As that of one that leaves or dies: it was kept until its turn when a transfer was given up."""
    script = [*pulls(0, 1), (now(1), 3.0), messages.Stuck(2, 1), (now(0), 1.0), *pulls(0, clock=1), *byes({0: 1})]
    done = serve(log, script, lambda_=2)
    assert done.weights == [-2.0]
    assert done.rows("pushes", "learner_id", "verdict") == [(1, Verdict.APPLY), (0, Verdict.APPLY)]
    assert done.told(Event.MISSED) == [(Event.MISSED, 0, 1)]
    assert done.balanced()


def test_a_torn_gradient_is_never_applied(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), Torn(now(1, seq=0)), Lost(2, 1), *pulls(0, clock=1), (now(0, 1), 1.0)]
    done = serve(log, [*script, *pulls(0, clock=2), *byes({0: 2})], lambda_=2)
    assert done.weights == [-2.0]
    assert done.rows("pushes", "learner_id", "verdict", "reason") == [
        (0, Verdict.APPLY, Reason.NONE), (1, Verdict.DROP, Reason.TORN), (0, Verdict.APPLY, Reason.NONE)
    ]  # fmt: skip
    assert done.rows("updates", "gradients") == [(1,), (1,)]
    assert done.balanced()


def test_the_next_gradient_is_not_received_where_a_torn_one_may_yet_be_written(log: Path) -> None:
    places: list[int] = []

    class Watching(ScriptedChannel):
        def receive(self, bodies: Pool, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
            message = super().receive(bodies, learner_id, until_s)
            push = message.push if isinstance(message, Torn) else message
            if isinstance(push, Push):
                places.append(push.body.memory.ctypes.data)
            return message

    script = [
        *pulls(0, 1),
        Torn(now(1, seq=0)),
        Lost(2, 1),
        (now(0), 1.0),
        *pulls(0, clock=1),
        (now(0, 1), 1.0),
        *pulls(0, clock=2),
    ]
    serve(log, Watching([*script, *byes({0: 2})]), AsyncOptions(), 2, budget=4)
    assert len(places) == 3
    assert places[0] not in places[1:]


def test_a_dead_one_that_waited_for_weights_is_given_none(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), *pulls(0, clock=1), Lost(1, 0), (now(1), 3.0), *pulls(1, clock=1), *byes({1: 1})]
    done = serve(log, script, lambda_=2)
    assert [answer[:2] for answer in done.answers] == [("weights", 0), ("weights", 1), ("stop", 1)]
    assert done.balanced()


@pytest.mark.parametrize("wrong", [Goodbye(1, 5, Ending.FINISHED), Goodbye(1, 0, Ending.FINISHED)])
def test_a_goodbye_that_cannot_be_is_refused_and_the_true_one_counts(log: Path, wrong: Goodbye, capsys: Any) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 2.0), wrong, *pulls(0, 1, clock=1), *byes({0: 1, 1: 1})]
    done = serve(log, script, lambda_=2)
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 1)]
    assert f"learner 1 says goodbye after {wrong.pushed} pushes: expected 1 ... 1" in capsys.readouterr().err
    assert done.balanced()


def test_nobody_says_goodbye_twice(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 2.0), *pulls(0, 1, clock=1), *byes({0: 1})[:1]]
    done = serve(log, [*script, *byes({0: 1, 1: 1})], lambda_=2)
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 0)]
    assert done.balanced()


def test_the_last_one_is_not_waited_for_after_a_goodbye_that_was_refused(log: Path) -> None:
    """It would be, for ever: it believes that it has left."""
    script = [*pulls(0), (push(0, 0), 1.0), Goodbye(0, 9, Ending.FINISHED), None]
    with pytest.raises(PeerError, match="no learner is left at clock 1"):
        serve(log, script, AsyncOptions(), lambda_=1, budget=100)


def test_without_learners_there_is_no_run(log: Path) -> None:
    with pytest.raises(PeerError, match="no learner is left at clock 0"):
        serve(log, [*pulls(0, 1), Lost(1, 0), Lost(2, 1)], lambda_=2)


def test_who_has_said_goodbye_may_die(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), Goodbye(0, 1, True), Lost(1, 0), *byes({1: 1})]
    assert serve(log, script, lambda_=2).told(Event.LOST) == []


# ----------------------------------------------------------------------------------------------------------------- missed


def test_one_that_hangs_is_missed_and_comes_back(log: Path) -> None:
    script = [
        *pulls(0, 1, 2), (now(0), 1.0), *pulls(0, clock=1), (now(1), 2.0), *pulls(1, clock=1), None,  # 2 owes a push
        (now(0, 1), 1.0), (now(2), 100.0), *pulls(2, clock=1), (now(1, 1), 1.0),  # its late gradient is dropped, then it is back
        *pulls(0, 1, clock=2), (now(2, 1), 1.0), *pulls(2, clock=2), *byes({0: 2, 1: 2, 2: 2}),
    ]  # fmt: skip
    done = serve(log, script, budget=10)
    assert done.told(Event.MISSED, Event.RETURNED) == [(Event.MISSED, 0, 2), (Event.RETURNED, 1, 2)]
    assert done.weights == [-2.5]
    assert done.rows("updates", "gradients") == [(2,), (3,)]
    assert (2, Verdict.DROP, Reason.MISSED) in done.rows("pushes", "learner_id", "verdict", "reason")
    assert done.balanced()


def test_the_last_one_is_waited_for(log: Path) -> None:
    script = [
        *pulls(0, 1),
        (now(1), 1.0),
        *pulls(1, clock=1),
        Lost(2, 1),
        None,
        None,
        (now(0), 3.0),
        *pulls(0, clock=1),
        *byes({0: 1}),
    ]
    done = serve(log, script, lambda_=2)
    assert done.told(Event.MISSED) == []
    assert done.weights == [-2.0]


def test_one_that_was_missed_is_back_with_a_gradient_of_this_clock(log: Path) -> None:
    """All others are dead: if it were dropped, nobody would ever make the update that its learner then waits for."""
    script = [*pulls(0, 1, 2), (now(2), 1.0), *pulls(2, clock=1), (now(1), 1.0), *pulls(1, clock=1), None, (now(1, 1), 1.0),
              Lost(2, 1), *pulls(0, clock=1), Lost(3, 2), (now(0, 1), 3.0), *pulls(0, clock=2), *byes({0: 1})]  # fmt: skip
    done = serve(log, script, budget=8)
    assert done.told(Event.MISSED, Event.LOST, Event.RETURNED) == [
        (Event.MISSED, 0, 0), (Event.LOST, 1, 1), (Event.RETURNED, 1, 0), (Event.LOST, 1, 2)
    ]  # fmt: skip
    assert done.weights == [-3.0]
    assert done.balanced()


def test_missed_ones_are_waited_for_where_all_others_are_dead(log: Path) -> None:
    script = [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, Lost(2, 1), None, (now(0), 9.0), *pulls(0, clock=1),
              (now(0, 1), 3.0), *pulls(0, clock=2), *byes({0: 2})]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=4)
    assert done.weights == [-4.0]


def test_who_does_not_come_back_is_lost_at_the_end_and_nobody_waits(log: Path) -> None:
    done = serve(log, [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, *byes({1: 1})], lambda_=2, budget=2)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.MISSED, 0, 0), (Event.LOST, 1, 0)]
    assert done.channel.given_up == [1]
    assert done.channel.told == [0], "the other shards are: when it goes on, it waits for this one"
    assert done.balanced()


@pytest.mark.parametrize("also", [0, 2])
def test_without_whom_another_shard_has_ended_nobody_is_waited_for(log: Path, also: int) -> None:
    """`also`: one that has said goodbye to this shard; it cannot go on either, and might be the one that is to evaluate."""
    script = [*pulls(0, 1, 2), (now(0), 1.0), (now(1), 1.0), (now(2), 1.0), *pulls(0, 2, clock=1), *byes({0: 1, 2: 1})]
    done = serve(log, [*script, messages.GivenUp(also, 1), messages.GivenUp(1, 1)])
    assert done.told(Event.LOST) == [(Event.LOST, 1, 1)]
    assert done.channel.given_up == [also + 1, 2]
    assert done.channel.told == []
    assert done.balanced()


def test_who_comes_back_after_the_end_is_told_to_stop(log: Path) -> None:
    script = [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, (now(0), 3.0), *pulls(0, clock=1), *byes({0: 1, 1: 1})]
    done = serve(log, script, lambda_=2, budget=2)
    assert done.answers[-1] == ("stop", 0, 1)
    assert done.weights == [-1.0]
    assert done.channel.given_up == []


def test_weights_that_take_long_to_leave_stay_as_they_are(log: Path) -> None:
    """Giving up an answer, the shard goes on with the same weights elsewhere; the learner's gradient is as good as any."""
    sent: list[np.ndarray] = []

    class Slow(ScriptedChannel):
        def start_answers(self, learner_ids: list[int], weights: np.ndarray, *more: Any) -> None:
            super().start_answers(learner_ids, weights, *more)
            sent.append(weights)

        def finish_answers(self, *, last: bool = False) -> bool:
            return len(sent) != 2

    script = [
        *pulls(1, 0), messages.Stuck(1, 0), (now(1), 1.0), *pulls(1, clock=1), (now(0), 1.0), *pulls(0, clock=1),
        (now(0, 1), 1.0), (now(1, 1), 1.0), *pulls(0, 1, clock=2), *byes({0: 2, 1: 2}),
    ]  # fmt: skip
    done = serve(log, Slow(script), lambda_=2, budget=6)
    assert done.told(Event.STUCK, Event.MISSED, Event.RETURNED) == [
        (Event.STUCK, 0, 0), (Event.MISSED, 0, 0), (Event.RETURNED, 1, 0)
    ]  # fmt: skip
    assert [weights.tolist() for weights in sent[:2]] == [[0.0], [0.0]], "the old memory"
    assert done.weights == [-2.0]
    assert (0, Verdict.DROP, Reason.MISSED) in done.rows("pushes", "learner_id", "verdict", "reason"), "of a clock that went on"


def test_a_shard_that_others_have_left_behind_does_not_wait_for_what_will_not_come(log: Path) -> None:
    """Learner 0 was given the weights of clock 1 here; another shard, which went on without it, has given it those of clock 2."""
    script = [
        *pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, (now(0), 1.0), *pulls(0, clock=1),  # missed, and back
        (now(1, 1), 1.0), *pulls(1, clock=2), *pulls(0, clock=2),  # it asks again: no gradient of clock 1 will come
        (now(0, 2), 1.0), (now(1, 2), 1.0), *pulls(0, 1, clock=3), *byes({0: 2, 1: 3}),
    ]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=8)
    assert done.told(Event.PASSED) == [(Event.PASSED, 1, 0)]
    assert done.rows("updates", "gradients") == [(1,), (1,), (2,)]
    assert done.balanced()


def test_an_interrupted_run_does_not_wait_for_those_who_hang(log: Path) -> None:
    script = [
        *pulls(0, 1),
        (now(1), 1.0),
        *pulls(1, clock=1),
        None,
        messages.Interrupt(15),
        Goodbye(1, 1, Ending.INTERRUPTED),
        LEAVE,
    ]
    done = serve(log, script, lambda_=2, budget=100)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.MISSED, 0, 0), (Event.LOST, 1, 0)]
    assert done.channel.given_up == [1]


def test_an_interrupted_run_is_saved_though_its_last_learner_dies(log: Path) -> None:
    """The evaluator, which was to wait until all have left, is answered; the run is not finished."""
    script = [*pulls(0, 1), SnapshotPull(FINAL), (now(0), 1.0), *pulls(0, clock=1), messages.Interrupt(15),
              Goodbye(0, 1, Ending.INTERRUPTED), Lost(2, 1), LEAVE]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=100)
    assert [answer[0] for answer in done.answers[-2:]] == ["interrupted", "snapshot"]
    assert not done.shard.rules.finished


def test_a_run_whose_others_have_done_their_share_ends_when_the_last_one_dies(log: Path) -> None:
    """versioned: each leaves by itself; the share of the dead is not trained on, but the weights are there."""
    script = [*pulls(0, 1), (now(0), 1.0), *pulls(0), Goodbye(0, 1, Ending.NONE), SnapshotPull(FINAL), Lost(2, 1), LEAVE]
    done = serve(log, script, VersionedOptions(grads_to_wait=1), lambda_=2, budget=math.inf)
    assert done.answers[-1][0] == "snapshot"
    assert done.shard.rules.finished
    assert done.balanced()


# -------------------------------------------------------------------------------------------------------------- evaluation


def test_the_evaluator_says_goodbye_to_the_first_shard_which_passes_it_on(log: Path) -> None:
    done = serve(log, [*pulls(0), (now(0), 1.0), *pulls(0, clock=1), *byes({0: 1})], lambda_=1, budget=2, first=True)
    assert done.channel.passed_on == 1
    assert done.evaluated == []


def test_shard_0_follows_the_evaluator_once_all_have_left(log: Path) -> None:
    script = [
        *pulls(0, 1, 2), (now(0), 1.0), (now(1), 1.0), (now(2), 1.0), SnapshotPull(0), *pulls(0, 1, 2, clock=1),
        Lost(EVALUATOR, -1), Goodbye(2, 1, True), Goodbye(1, 1, True), Lost(3, 2), Goodbye(0, 1, True),
    ]  # fmt: skip
    done = serve(log, script, lambda_=3, budget=6, first=True)
    assert [taken.vectors[0].tolist() for taken in done.evaluated] == [done.weights]
    assert done.balanced()


def test_where_no_other_rank_is_left_the_weights_are_evaluated(log: Path) -> None:
    script = [*pulls(0), (now(0), 1.0), *pulls(0, clock=1), Lost(1, 0), Lost(EVALUATOR, -1)]
    done = serve(log, script, lambda_=1, budget=2, first=True)
    assert len(done.evaluated) == 1


def test_a_learner_that_hangs_is_lost_before_shard_0_evaluates(log: Path) -> None:
    script = [*pulls(0, 1), Lost(EVALUATOR, -1), (now(1), 1.0), *pulls(1, clock=1), None, *byes({1: 1})[:1]]
    done = serve(log, script, lambda_=2, budget=2, first=True)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.MISSED, 0, 0), (Event.LOST, 1, 0)]
    assert (done.channel.given_up, done.channel.told, len(done.evaluated)) == ([1], [0], 1)
    assert done.balanced()


# ------------------------------------------------------------------------------------------------------ messages that cannot be


def test_who_was_told_to_stop_elsewhere_is_not_waited_for_once_all_others_wait(log: Path) -> None:
    """Another shard, which lacks nothing, has finished, and told one learner so; the others ask this shard first."""
    script = [*pulls(0, 1, 2), Goodbye(2, 0, Ending.FINISHED), (now(0), 1.0), *pulls(0, clock=1), (now(1), 2.0),
              *pulls(1, clock=1), *byes({0: 1, 1: 1})]  # fmt: skip
    done = serve(log, script, budget=100)
    assert done.weights == [-1.5]
    assert done.told(Event.DEPARTED) == [(Event.DEPARTED, 0, 2)]
    assert done.balanced()


def test_a_torn_push_counts_and_the_next_one_is_in_its_order(log: Path) -> None:
    script = [*pulls(0, 1), Torn(now(0, 0, 0)), (now(1), 1.0), *pulls(0, 1, clock=1), (now(0, 1, 1), 2.0), (now(1, 1), 2.0),
              *pulls(0, 1, clock=2), *byes({0: 2, 1: 2})]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=6)
    assert done.weights == [-3.0]
    assert done.shard.refusals.total == 0
    assert done.balanced()


def test_a_torn_push_that_cannot_be_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = [*pulls(0, 1), Torn(now(0, 0, 7)), (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), *byes({0: 2, 1: 1})]
    done = serve(log, script, SoftsyncOptions(), lambda_=2, budget=4)
    assert "learner 0 pushed mini-batch 7: expected 0 ... 0, the next mini-batch" in capsys.readouterr().err
    assert done.weights == [-1.0]
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 0, 0)]
    assert done.balanced()


def test_one_that_was_missed_may_push_what_is_no_longer_fresh_others_may_not(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = [*pulls(0, 1, 2), (now(1), 1.0), (now(2), 1.0), *pulls(1, 2, clock=1), None, (now(0), 9.0), (now(1, 0, 1), 9.0),
              (now(1, 1, 1), 1.0), (now(2, 1), 1.0), *pulls(0, 1, 2, clock=2), *byes({0: 1, 1: 3, 2: 2})]  # fmt: skip
    done = serve(log, script, budget=8)
    assert done.rows("pushes", "learner_id", "reason")[2] == (0, Reason.MISSED)
    assert "learner 1 pushed timestamp 0: expected 1, the shard's clock" in capsys.readouterr().err
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 1)]
    assert done.weights == [-2.0]
    assert done.balanced()
