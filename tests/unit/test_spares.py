"""One shard of a run with spares, message by message (`serving/spares.py`, `serving/faults.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import GivenUp, Goodbye, Lost, Succeeds
from mpisgd.protocols import AsyncOptions, HardsyncOptions, ProtocolOptions
from mpisgd.records.log.schema import Event
from tests.unit.tolerant_served import LEAVE, Channel, Served, byes, now, pulls


class Spared(Channel):
    """Spares are ranks 7 and 8."""

    spare_ranks = (7, 8)

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.said: list[tuple[Any, ...]] = []
        self.ranks: dict[int, int] = {}

    def rank_of(self, learner_id: int) -> int:
        return self.ranks.get(learner_id, learner_id + 1)

    def lose(self, rank: int) -> None:
        self.said.append(("lose", rank))

    def appoint(self, rank: int, learner_id: int) -> None:
        self.said.append(("appoint", rank, learner_id))

    def succeed(self, learner_id: int, rank: int, pushed: int, last_seq: int) -> None:
        self.ranks[learner_id] = rank
        self.said.append(("succeed", learner_id, rank, pushed, last_seq))

    def pass_on_nothing_more(self) -> None:
        self.said.append(("nothing more",))


def serve(tmp_path: Path, script: list[Any], options: ProtocolOptions | None = None, *, first: bool = True) -> Served:
    """Two learners; three updates of one gradient, or of as many as there are learners."""
    return Served(tmp_path / "log.h5", Spared(script), options or AsyncOptions(), 2, 6, first=first)


CAME_OR_WENT = (Event.LOST, Event.SUCCEEDED)


def test_shard_0_appoints_a_spare_and_dismisses_the_other_at_the_end(tmp_path: Path) -> None:
    script = [*pulls(0, 1), (now(1), 1.0), Lost(2, 1), Succeeds(7, 1), *pulls(1), (now(1, 1, 1), 1.0), *pulls(0), (now(0), 1.0)]
    done = serve(tmp_path, [*script, *pulls(0, 1), *byes(l0=1, l1=2)])
    assert done.channel.said == [("appoint", 7, 1), ("lose", 2), ("succeed", 1, 7, 1, 0), ("nothing more",), ("appoint", 8, -1)]
    assert done.told(*CAME_OR_WENT) == [(Event.LOST, 1, 1), (Event.SUCCEEDED, 1, 1)]
    assert done.balanced()


def test_another_shard_may_hear_of_a_death_by_the_spare_alone(tmp_path: Path) -> None:
    """And the mini-batch that came last may have come to the others alone."""
    script = [*pulls(0, 1), (now(1), 1.0), Succeeds(7, 1), *pulls(1), (now(1, 1, 2), 1.0), *pulls(0), (now(0), 1.0)]
    done = serve(tmp_path, [*script, *pulls(0, 1), *byes(l0=1, l1=2)], first=False)
    assert done.channel.said == [("lose", 2), ("succeed", 1, 7, 1, 0)]
    assert done.told(*CAME_OR_WENT) == [(Event.LOST, 1, 1), (Event.SUCCEEDED, 1, 1)]
    assert [seq for (seq,) in done.rows("pushes", "seq")] == [0, 2, 0]
    assert done.balanced()


def test_hardsync_waits_for_the_spare_too(tmp_path: Path) -> None:
    """Though the dead one had been heard at this clock: the divisor is counted."""
    script = [*pulls(0, 1), (now(0), 1.0), Lost(1, 0), Succeeds(7, 0), *pulls(0), (now(0, 0, 1), 1.0), (now(1), 1.0)]
    done = serve(tmp_path, [*script, *pulls(0, 1, clock=1), *byes(l0=2, l1=1)], HardsyncOptions())
    assert done.rows("updates", "clock", "gradients") == [(1, 3)]
    assert done.balanced()


@pytest.mark.parametrize("first", [True, False])
def test_while_a_spare_is_to_come_the_run_is_not_over(first: bool, tmp_path: Path) -> None:
    script = [*pulls(0, 1), Lost(1, 0), Lost(2, 1), Succeeds(7, 0), Succeeds(8, 1), *pulls(0, 1)]
    pushes = [(now(0), 1.0), (now(1, 1), 1.0), *pulls(0), (now(0, 2, 1), 1.0), *pulls(0, 1)]
    done = serve(tmp_path, [*script, *pushes, *byes(l0=2, l1=1)], first=first)
    assert [kind for kind, *_ in done.told(*CAME_OR_WENT)] == [Event.LOST, Event.LOST, Event.SUCCEEDED, Event.SUCCEEDED]


@pytest.mark.parametrize("first", [True, False])
def test_when_all_spares_are_dead_too_it_is(first: bool, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no learner is left at clock 0"):
        serve(tmp_path, [*pulls(0, 1), Lost(1, 0), Lost(7, -1), Lost(2, 1), Lost(8, -1)], first=first)


def test_the_next_follows_a_spare_that_dies_before_it_is_heard_of(tmp_path: Path) -> None:
    script = [*pulls(0, 1), Lost(2, 1), Lost(7, -1), Succeeds(8, 1), *pulls(1), (now(1), 1.0), *pulls(1), (now(1, 1, 1), 1.0)]
    done = serve(tmp_path, [*script, *pulls(1), (now(1, 2, 2), 1.0), *pulls(0, 1), *byes(l0=0, l1=3)])
    assert done.channel.said[:2] == [("appoint", 7, 1), ("appoint", 8, 1)]
    assert done.told(*CAME_OR_WENT) == [(Event.LOST, 0, 1), (Event.SUCCEEDED, 0, 1)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [Lost(8, -1), Succeeds(8, 0)])
def test_others_are_told_of_a_place_whose_spare_is_dead_and_none_follows(last: Any, first: bool, tmp_path: Path) -> None:
    """They may not have heard of that spare, unless shard 0, the last, has; and whose place it took may live, and wait."""
    script = [*pulls(0, 1), Succeeds(7, 1), Lost(7, 1), *pulls(0), (now(0), 1.0), *pulls(0)]
    later = [(now(0, 1, 1), 1.0), *pulls(0), last, (now(0, 2, 2), 1.0), *pulls(0), *byes(l0=3)]
    assert serve(tmp_path, [*script, *later], first=first).channel.told == ([] if first else [1])


def test_others_are_not_told_of_a_place_to_which_another_spare_comes(tmp_path: Path) -> None:
    script = [*pulls(0, 1), Succeeds(7, 1), Lost(7, 1), *pulls(0), Succeeds(8, 1), *pulls(1)]
    pushes = [part for clock in range(3) for part in ((now(0, clock, clock), 1.0), *pulls(0))]
    assert serve(tmp_path, [*script, *pushes, *pulls(1), *byes(l0=3, l1=0)], first=False).channel.told == []


@pytest.mark.parametrize("before", [True, False])
def test_who_is_forsaken_elsewhere_is_not_waited_for_though_it_is_the_last(before: bool, tmp_path: Path) -> None:
    """`before`: shard 0 hears so before it hears that the spare is dead."""
    news = [GivenUp(1), Lost(8, -1)]
    script = [*pulls(0, 1), Lost(7, -1), (now(0), 1.0), *pulls(0), Goodbye(0, 1, 0), None]
    done = serve(tmp_path, [*script, *(news if before else reversed(news)), LEAVE])
    assert done.channel.said[0] == ("appoint", 8, 1)
    assert done.told(Event.LOST) == [(Event.LOST, 1, 1)]
    assert done.balanced()


ALL_DONE = [*pulls(0, 1), *((now(0, clock, clock), 1.0) for clock in range(3)), *pulls(0)]


def test_evaluation_ends_when_each_spare_was_heard_of(tmp_path: Path) -> None:
    """Else another shard may have left before it comes there."""
    said = byes(l0=3)[:-1]
    done = serve(tmp_path, [*ALL_DONE, *said, Lost(2, 1), LEAVE, Succeeds(7, 1), *pulls(1), *byes(l1=0)[:-1]])
    assert done.channel.said[1:] == [("lose", 2), ("succeed", 1, 7, 0, -1), ("nothing more",), ("appoint", 8, -1)]
    assert done.channel.duties[-1] == (1, 0)


def test_a_spare_that_hangs_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    done = serve(tmp_path, [*ALL_DONE, *byes(l0=3)[:-1], Lost(2, 1), LEAVE, None, None])
    assert done.channel.given_up == [7]
    assert done.channel.said == [("appoint", 7, 1), ("nothing more",), ("appoint", 8, -1)]
