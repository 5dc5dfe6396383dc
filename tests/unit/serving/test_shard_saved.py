"""A shard's loop: snapshots, checkpoints, and what an interruption saves (DESIGN 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpisgd.comm.messages import FINAL, Ending, Goodbye, Interrupt, Pull, SnapshotPull
from mpisgd.protocols import (
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
)
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.shard import Shard
from tests.unit.shards import EVERYBODY, LEAVE, Crew, Served, byes, pulls, push, serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


# -------------------------------------------------------------------------------------------------------------- snapshots


def test_snapshots_are_given_in_order_when_they_are_there_and_nothing_after_the_end(log: Path) -> None:
    """One per epoch of 4 samples; the pull of a snapshot to come is answered when it is taken, FINAL after the end."""
    script = [
        SnapshotPull(0), SnapshotPull(1), *pulls(0), (push(0), 1.0), *pulls(0), (push(0, 1, 1), 1.0), SnapshotPull(2), *pulls(0),
        (push(0, 2, 2), 1.0), *pulls(0), SnapshotPull(FINAL), (push(0, 3, 3), 1.0), *pulls(0), SnapshotPull(2), SnapshotPull(3),
        SnapshotPull(FINAL), *byes({0: 4}),
    ]  # fmt: skip
    done = serve(log, script, SoftsyncOptions(), 1, budget=8, every_epochs=1.0, averaging=0.5)
    assert [answer for answer in done.answers if answer[0] == "snapshot"] == [
        ("snapshot", 0, 0, [[0.0], [0.0]]),
        ("snapshot", 2, 4, [[-2.0], [-1.25]]),
        ("snapshot", 4, 8, [[-4.0], [-3.0625]]),
        ("snapshot", 0, 0, [[], []]),
        ("snapshot", 0, 0, [[], []]),
        ("snapshot", 4, 8, [[-4.0], [-3.0625]]),
    ]
    assert [row[1] for row in done.rows("events", "kind", "clock") if row[0] == Event.SNAPSHOT] == [0, 2]


def test_a_snapshot_that_is_waited_for_ends_with_the_learners(log: Path) -> None:
    script = [*pulls(0), SnapshotPull(5), Goodbye(0, 0, Ending.NONE), SnapshotPull(FINAL), LEAVE]
    done = serve(log, script, SoftsyncOptions(), 1)
    assert done.answers[1:] == [("snapshot", 0, 0, [[]]), ("snapshot", 0, 0, [[0.0]])]


# ------------------------------------------------------------------------------------------------------------ checkpoints


class Noted:
    """Checkpoints that are noted, not written."""

    def __init__(self, every: int, slow_at: int = -1) -> None:
        self.every = every
        self.slow_at = slow_at
        self.taken: list[dict[str, Any]] = []
        self.asked = 0
        self.failed: list[int] = []

    def due(self, clock: int) -> bool:
        return clock % self.every == 0

    lasts = due

    def busy(self) -> bool:
        self.asked += 1
        return self.asked == self.slow_at

    def take(self, **account: Any) -> None:
        self.taken.append({key: list(value) if isinstance(value, list) else value for key, value in account.items()})
        if account["clock"] in (2, 8):
            self.failed.append(account["clock"])

    def wait(self) -> None:
        """Nothing is under way."""

    def lost(self) -> list[int]:
        failed, self.failed = self.failed, []
        return failed


def test_a_checkpoint_is_taken_at_every_clock_that_is_due(log: Path) -> None:
    crew = Crew(3, lambda timestamp: timestamp, lambda learner_id, seq: 1.0)
    done = Served(log, crew, SoftsyncOptions(n=2), 3, budget=18, every_epochs=1.0)
    done.shard.records.checkpoints = noted = Noted(2, slow_at=3)  # type: ignore[assignment]
    done.shard.snapshot_server.is_open = False
    done.run()
    pushes, events = read_table(log, "pushes"), read_table(log, "events")
    assert [each["clock"] for each in noted.taken] == [2, 4, 8], "not at 6, and not at the end"
    assert events["clock"][events["kind"] == Event.SKIPPED].tolist() == [6]
    assert events["clock"][events["kind"] == Event.CHECKPOINT].tolist() == [2, 4, 8]
    lost = events[events["kind"] == Event.UNSAVED]
    assert lost["value"].tolist() == [2, 8]
    assert lost["clock"].tolist() == [4, done.shard.rules.clock], "told at the next, or at the end"
    for each in noted.taken:
        before = pushes[: each["rows"][0]]
        assert each["received"] == len(before) == each["clock"], "the rows that made these updates, and no more"
        assert each["next_seq"] == [1 + before["seq"][before["learner_id"] == who].max(initial=-1) for who in EVERYBODY]
        assert [clock for clock, *_ in each["snapshots"]] == [*range(0, each["clock"] + 1, 2)]


# ----------------------------------------------------------------------------------------------------------- interruptions

INTERRUPTED = Ending.INTERRUPTED
#: Three gradients make an update. The first is made before the signal; after it come two more gradients.
DRAIN: list[Any] = [
    *pulls(*EVERYBODY), (push(0, 0), 1.0), Pull(0, 0), (push(0, 0), 1.0), (push(1, 0), 1.0), Pull(0, 1), Pull(1, 2),
    Interrupt(10), SnapshotPull(0), (push(2, 0), 5.0), Pull(2, 0), (push(0, 1), 5.0), Pull(0, 1), Interrupt(10),
]  # fmt: skip


def interrupted(log: Path, script: Sequence[Any], options: ProtocolOptions, **fields: Any) -> tuple[Shard, Noted, list[Any]]:
    done = Served(log, script, options, 3, **fields)
    done.shard.records.checkpoints = noted = Noted(100)  # type: ignore[assignment]
    done.run().shard.log.summary(-1, 0, 0, 0, False)
    return done.shard, noted, done.answers


def goodbyes(*pushed: int, ending: Ending = INTERRUPTED) -> list[Any]:
    return byes(dict(enumerate(pushed)), ending)


def test_an_interrupted_shard_drains_and_saves_what_its_last_update_left(log: Path) -> None:
    script = [*DRAIN, *goodbyes(3, 1, 1)]
    shard, noted, answers = interrupted(log, script, SoftsyncOptions(n=1, modulation="none"))
    assert (shard.rules.interrupted, shard.rules.finished, shard.rules.clock) == (True, False, 1)
    assert answers[5:] == [
        ("interrupted", 1, 1), ("interrupted", 2, 1), ("interrupted", 0, 1), ("snapshot", 0, 0, [[]])
    ], "at once who waits; the evaluator when it is known that the run does not end by itself"  # fmt: skip
    rows, events = read_table(log, "pushes"), read_table(log, "events")
    assert rows["verdict"].tolist() == [Verdict.APPLY] * 5
    assert events[events["kind"] == Event.INTERRUPTED][["clock", "value"]].tolist() == [(1, 10)], "once"
    (saved,) = noted.taken
    assert (saved["clock"], saved["received"], saved["last"]) == (1, 3, True)
    assert (saved["applied_seq"], saved["next_seq"]) == ([1, 0, -1], [2, 1, 0]), "the two gradients after it are computed again"
    assert saved["rows"][:2] == [3, 1]
    assert [clock for clock, *_ in saved["snapshots"]] == [0]


def test_updates_are_made_in_the_drain(log: Path) -> None:
    """And a shard that no signal came to learns of it from the goodbyes; nobody has departed."""
    script = [
        *pulls(*EVERYBODY), *((push(each, 0), 1.0) for each in EVERYBODY), *pulls(*EVERYBODY), (push(0, 1), 1.0), Pull(0, 0),
        Goodbye(0, 2, INTERRUPTED), (push(1, 1), 1.0), Pull(1, 0), (push(2, 1), 1.0), Pull(2, 0), *goodbyes(2, 2, 2)[1:],
    ]  # fmt: skip
    shard, noted, answers = interrupted(log, script, SoftsyncOptions(n=1, modulation="none"))
    assert (shard.rules.interrupted, shard.rules.finished, shard.rules.clock) == (True, False, 2)
    assert answers[-2:] == [("interrupted", 1, 1), ("interrupted", 2, 2)]
    assert (noted.taken[-1]["clock"], noted.taken[-1]["next_seq"]) == (2, [2, 2, 2])
    assert Event.DEPARTED not in read_table(log, "events")["kind"]


def test_what_one_who_left_had_pushed_before_its_turn_makes_an_update_of_the_drain(log: Path) -> None:
    """On other shards it was not before its turn, and the update has been made there."""
    script = [
        *pulls(*EVERYBODY), (push(1, 0), 1.0), (push(2, 0), 2.0), Interrupt(10), Pull(1, 1), Pull(2, 1), *goodbyes(1, 1, 1)[1:3],
        (push(0, 0), 4.0), Pull(0, 1), *goodbyes(1, 1, 1)[:1],
    ]  # fmt: skip
    shard, noted, _ = interrupted(log, [*script, *goodbyes(1, 1, 1)[3:]], HardsyncOptions())
    assert shard.rules.clock == noted.taken[-1]["clock"] == 1
    assert read_table(log, "pushes")["learner_id"].tolist() == [0, 1, 2], "in the order of learners"


@pytest.mark.parametrize("signal_first", [True, False])
def test_where_enough_was_seen_the_run_is_finished_and_what_nobody_wants_is_late(log: Path, signal_first: bool) -> None:
    """Learner 0, whose turn it would be, is stopped; the gradients of the others are for a sum that will not be finished."""
    signal = [Interrupt(10)] if signal_first else []
    script = [
        *pulls(1, 2), *signal, SnapshotPull(0, 3), Pull(0, 0), Goodbye(0, 0, Ending.ENOUGH), (push(1, 0), 1.0), (push(2, 0), 2.0),
        Pull(1, 1), Pull(2, 1), Goodbye(1, 1, Ending.ENOUGH), Goodbye(2, 1, Ending.ENOUGH), SnapshotPull(FINAL, 3), LEAVE,
    ]  # fmt: skip
    shard, noted, answers = interrupted(log, script, HardsyncOptions())
    assert (shard.rules.finished, shard.rules.clock, noted.taken) == (True, 0, [])
    assert answers[-1] == ("snapshot", 0, 0, [[0.0]])
    rows, events = read_table(log, "pushes"), read_table(log, "events")
    assert rows[["learner_id", "verdict", "reason"]].tolist() == [(each, Verdict.LATE, Reason.FINISHED) for each in (1, 2)]
    assert events[events["kind"] == Event.ENOUGH][["clock", "value"]].tolist() == [(0, 2)], "once"
    assert shard.received == shard.pushed == [0, 1, 1]


def test_a_budget_that_the_drain_uses_up_ends_the_run(log: Path) -> None:
    """Five gradients of two samples, and the sixth: all shards come to that, for all have the same pushes in the end."""
    script = [*DRAIN, (push(1, 1), 2.0), Pull(1, 2), *goodbyes(3, 2, 1)[:-1], SnapshotPull(FINAL), LEAVE]
    script.remove(SnapshotPull(0))
    shard, noted, answers = interrupted(log, script, SoftsyncOptions(n=1, modulation="none"), budget=12)
    assert (shard.rules.finished, shard.rules.clock, noted.taken) == (True, 2, [])
    assert answers[-2:] == [("stop", 1, 2), ("snapshot", 2, 12, [[-5.0]])]


def test_a_signal_after_the_end_is_too_late(log: Path) -> None:
    done = serve(log, [*pulls(0), (push(0), 1.0), Interrupt(10), Pull(0, 0), *byes({0: 1})], SoftsyncOptions(n=1), 1, budget=2)
    assert (done.shard.rules.interrupted, done.shard.rules.finished) == (False, True)
    assert done.summary[:3] == (0, 1, 2)


@pytest.mark.parametrize("parked_nbytes", [0, 2**30])
def test_an_ordered_sum_that_will_not_be_finished_is_left_as_it_is(
    log: Path, parked_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hardsync: learner 1's turn never comes, so what learner 2 has pushed is neither summed nor in the log."""
    monkeypatch.setattr("mpisgd.vectors.body.PARKED_NBYTES", parked_nbytes)
    script: list[Any] = [
        *pulls(0, 2), (push(0), 1.0), Interrupt(15), Pull(1, 0), Pull(0, 1), Goodbye(1, 0, INTERRUPTED), (push(2), 1.0), Pull(2, 1),
        Goodbye(0, 1, INTERRUPTED), Goodbye(2, 1, INTERRUPTED), LEAVE,
    ]  # fmt: skip
    _, noted, answers = interrupted(log, script, HardsyncOptions())
    assert read_table(log, "pushes")["learner_id"].tolist() == [0]
    assert (noted.taken[0]["clock"], noted.taken[0]["received"], noted.taken[0]["next_seq"]) == (0, 0, [0, 0, 0])
    assert answers[-3:] == [("interrupted", 1, 0), ("interrupted", 0, 0), ("interrupted", 2, 0)]


def test_what_was_saved_is_not_saved_again(log: Path) -> None:
    done = Served(log, [*DRAIN, *goodbyes(3, 1, 1)], SoftsyncOptions(n=1), 3)
    done.shard.records.checkpoints = noted = Noted(1)  # type: ignore[assignment]
    done.run()
    assert [each["clock"] for each in noted.taken] == [1]


def test_a_shard_goes_on_from_a_checkpoint(log: Path) -> None:
    """Learner 1 is asked for mini-batches 3 to 5 again, of which this shard has applied the first two and dropped the last."""
    account = Account(
        shard=0, bounds=(0, 1), clock=7, samples=14, now_s=5.0, received=9, applied_seq=[3, 4], next_seq=[4, 6],
        rows=[[0, 9, 7, 0, 1]], snapshots=[],
    )  # fmt: skip
    script = [
        *pulls(0, 1), (push(1, 7, seq=3), 100.0), (push(1, 7, seq=4), 100.0), (push(1, 7, seq=5), 1.0), (push(0, 7, seq=4), 1.0),
        *pulls(0, 1), *byes({0: 1, 1: 3}),
    ]  # fmt: skip
    done = Served(log, script, SoftsyncOptions(n=2, modulation="none"), 2, budget=18)
    done.shard.update.samples = account.samples
    done.shard.restore(account, [4, 3])
    rows = done.run().rows("pushes", "learner_id", "seq", "clock", "verdict", "reason")
    applied, repeated = (Verdict.APPLY, Reason.NONE), (Verdict.DROP, Reason.REPEATED)
    assert rows == [(1, 3, 7, *repeated), (1, 4, 7, *repeated), (1, 5, 7, *applied), (0, 4, 8, *applied)]
    assert read_table(log, "events")["kind"].tolist() == [Event.RESUMED, Event.STOPPED, Event.GOODBYE, Event.GOODBYE]
    assert done.weights == [-2.0]
    assert done.summary == (0, 9, 18, 13, 13, 0), "those before count"


def test_ssp_goes_on_from_where_learners_are() -> None:
    protocol = SspOptions(slack=1).make(3)
    protocol.on_resume([7, 5, 6])
    assert [protocol.may_pull(learner_id, 0) for learner_id in EVERYBODY] == [False, True, True]
    protocol.on_push(1, 0, 0)
    assert [protocol.may_pull(learner_id, 0) for learner_id in EVERYBODY] == [True, True, True]
