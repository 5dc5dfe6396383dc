"""A shard that waits for the last who might come: as long as they give signs of life, and no longer (DESIGN 4, law 9)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import FINAL, Ending, Goodbye, Interrupt, Lost, SnapshotPull
from mpisgd.protocols import AsyncOptions, HardsyncOptions, ProtocolOptions, VersionedOptions
from mpisgd.records.log.schema import Event
from tests.unit.shards import EVALUATOR, LEAVE, SHARD_0, ScriptedChannel, Served, byes, now, pulls, tolerant_serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


def serve(log: Path, script: list[Any], options: ProtocolOptions | None = None, *, hang: set[int], **named: Any) -> Served:
    """Two learners, of ranks 1 and 2, of whom `hang` give no sign of life."""
    channel = ScriptedChannel(script)
    channel.hang = hang
    return tolerant_serve(log, channel, options, **{"lambda_": 2, **named})


def test_nobody_is_asked_as_long_as_the_others_can_go_on(log: Path) -> None:
    done = serve(log, [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, *byes({1: 1})], hang={1}, budget=2)
    assert done.told(Event.MISSED) == [(Event.MISSED, 0, 0)]
    assert done.channel.asked == set()


@pytest.mark.parametrize("options", [HardsyncOptions(), AsyncOptions()])
def test_the_last_one_ends_the_job_when_it_gives_none(log: Path, options: ProtocolOptions, capsys: Any) -> None:
    with pytest.raises(PeerError, match=r"no learner is left at clock \d"):
        serve(log, [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), Lost(2, 1), None, None], options, hang={1})
    assert "rank 1 gave no sign of life, and nobody else goes on" in capsys.readouterr().err


def test_one_that_was_missed_may_still_come_back_if_it_lives(log: Path) -> None:
    hanging, back = [*pulls(0, 1), None, None, None], [(now(0), 1.0), *pulls(0, clock=1), (now(0, 1), 1.0), *pulls(0, clock=2)]
    script = [*hanging, *back, Goodbye(0, 2, Ending.FINISHED), None, LEAVE]
    done = serve(log, script, AsyncOptions(), hang={2})
    assert done.channel.asked == {1, 2, SHARD_0}
    assert done.told(Event.MISSED, Event.RETURNED, Event.LOST) == [
        (Event.MISSED, 0, 0), (Event.RETURNED, 0, 0), (Event.MISSED, 2, 1), (Event.LOST, 2, 1)
    ]  # fmt: skip
    assert done.weights == [-2.0]


def test_where_all_are_silent_the_job_ends(log: Path) -> None:
    with pytest.raises(PeerError, match="no learner is left at clock 0"):
        serve(log, [*pulls(0, 1), None, None], hang={1, 2})


def test_where_others_have_done_their_share_the_run_ends_without_the_last_one(log: Path) -> None:
    """versioned: each leaves by itself."""
    script = [*pulls(0, 1), (now(0), 1.0), *pulls(0), Goodbye(0, 1, Ending.NONE), SnapshotPull(FINAL), None, None, LEAVE]
    done = serve(log, script, VersionedOptions(grads_to_wait=1), hang={2}, budget=math.inf)
    assert done.told(Event.LOST) == [(Event.LOST, 1, 1)]
    assert done.channel.told == [1], "the other shards are"
    assert done.answers[-1][0] == "snapshot"
    assert done.shard.rules.finished


def test_one_that_was_missed_and_waits_goes_on_without_the_last_one(log: Path) -> None:
    """Another shard has missed the other one, and is ahead: there, what waits here has been given the weights of clock 1."""
    script = [*pulls(0, 1), None, *pulls(0, clock=1), None, (now(0, 1), 1.0), *pulls(0, clock=2), *byes({0: 1})]
    done = serve(log, script, hang={2}, budget=2)
    assert done.told(Event.MISSED, Event.RETURNED, Event.PASSED, Event.LOST) == [
        (Event.MISSED, 0, 0), (Event.RETURNED, 0, 0), (Event.MISSED, 0, 1), (Event.PASSED, 0, 0), (Event.LOST, 2, 1)
    ]  # fmt: skip
    assert done.balanced()


def test_when_the_run_is_over_the_last_one_is_not_waited_for(log: Path) -> None:
    """The evaluator, which is no learner, lives."""
    script = [*pulls(0), (now(0), 1.0), *pulls(0, clock=1), None, None, SnapshotPull(FINAL), LEAVE]
    done = serve(log, script, hang={1}, lambda_=1, budget=2, first=True)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.LOST, 1, 0)]
    assert done.answers[-1][0] == "snapshot"


def test_an_interrupted_run_is_saved_without_the_last_one(log: Path) -> None:
    done = serve(log, [*pulls(0), Interrupt(15), None, None, LEAVE], hang={1}, lambda_=1, budget=99)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.LOST, 0, 0)]
    assert not done.shard.rules.finished


# -------------------------------------------------------------------------------------------------------------- evaluation

_TRAINED = [*pulls(0, 1), (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), Goodbye(0, 1, Ending.FINISHED)]


def test_the_evaluator_is_not_asked_while_others_train(log: Path) -> None:
    """It may be back before it is needed."""
    script = [*pulls(0, 1), None, (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), *byes({0: 1, 1: 1})]
    done = serve(log, script, hang={EVALUATOR}, first=True)
    assert done.channel.asked == {1, 2}


def test_shard_0_evaluates_where_the_evaluator_hangs_when_all_have_left(log: Path) -> None:
    done = serve(log, [*_TRAINED, Goodbye(1, 1, Ending.FINISHED), None], hang={EVALUATOR}, first=True)
    assert done.channel.given_up == [EVALUATOR]
    assert [taken.vectors[0].tolist() for taken in done.evaluated] == [done.weights]


def test_other_shards_wait_for_shard_0(log: Path) -> None:
    script = [*_TRAINED, Goodbye(1, 1, Ending.FINISHED), None, SnapshotPull(FINAL), LEAVE]
    done = serve(log, script, hang={EVALUATOR})
    assert done.channel.given_up == []
    assert done.evaluated == []
    assert done.answers[-1][0] == "snapshot"


def test_other_shards_end_the_job_without_shard_0(log: Path) -> None:
    with pytest.raises(PeerError, match="the job needs shard 0"):
        serve(log, [*_TRAINED, Goodbye(1, 1, Ending.FINISHED), None], hang={SHARD_0})
