"""A shard's loop before scripted and well-behaved learners: verdicts, answers, the end, and every row of the log (DESIGN 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import DivergenceError, PeerError, ProtocolError
from mpisgd.comm.messages import FINAL, NOTHING_MORE, Ending, Goodbye, Interrupt, Pull, Push, Refused, SnapshotPull
from mpisgd.config import SgdOptions
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log import schema
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.refusals import Refusals
from mpisgd.shard import Shard
from mpisgd.update.average import Average
from mpisgd.update.slice_update import SliceUpdate
from tests.unit.fakes import Crew, ScriptedChannel, Stuck, push, tensor

LEAVE = SnapshotPull(NOTHING_MORE)
EVERYBODY = (0, 1, 2)


@dataclass
class Served:
    """What was left when everybody had gone."""

    shard: Shard
    answers: list[tuple[Any, ...]]
    path: Path

    def rows(self, table: str, *columns: str) -> list[Any]:
        return read_table(self.path, table)[list(columns)].tolist()

    @property
    def weights(self) -> list[float]:
        return self.shard.update.weights.tolist()

    @property
    def summary(self) -> tuple[Any, ...]:
        return tuple(read_summary(self.path)[0].tolist())


def make(path: Path, channel: ScriptedChannel, options: ProtocolOptions, lambda_: int, **fields: Any) -> tuple[Shard, Snapshots]:
    """A shard of one weight that begins at 0, plain SGD of rate 1, two samples in a push, four in an epoch."""
    given = {"budget": 10**6, "nonfinite": "stop", "every_epochs": 0.0, "averaging": 0.0, "timeout_s": math.inf, **fields}
    weights = tensor(*[0.0] * given.get("weights", 1))
    update = SliceUpdate(
        weights,
        SgdOptions(momentum=0.0),
        learning_rate=1.0,
        schedule=lambda _: 1.0,
        train_samples=4,
        average=Average.of(weights, given["averaging"]),
    )
    snapshots = Snapshots(
        path.with_suffix(".snapshots"),
        every_epochs=given["every_epochs"],
        vectors=1 + (given["averaging"] > 0),
        size=given.get("weights", 1),
    )
    shard = Shard(
        channel,  # type: ignore[arg-type]
        Rules(options.make(lambda_), lambda_, given["budget"]),
        update,
        ShardRecords(ShardLog(TableFile(path, shard=0, flush_rows=100, flush_s=1e9), 0), Progress("off", 1.0, 1.0), snapshots),
        nonfinite=given["nonfinite"],
        timeout_s=given["timeout_s"],
    )
    return shard, snapshots


def serve(path: Path, script: Sequence[Any] | Crew, options: ProtocolOptions, lambda_: int, **fields: Any) -> Served:
    channel = script if isinstance(script, ScriptedChannel) else ScriptedChannel(script)
    shard, snapshots = make(path, channel, options, lambda_, **fields)
    shard.serve()
    snapshots.close()
    return Served(shard, channel.answers, path)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


def pulls(*learner_ids: int, clock: int = 0) -> list[Pull]:
    return [Pull(learner_id, clock) for learner_id in learner_ids]


def byes(pushed: dict[int, int], ending: Ending = Ending.FINISHED) -> list[Any]:
    return [*(Goodbye(learner_id, count, ending) for learner_id, count in pushed.items()), LEAVE]


# -------------------------------------------------------------------------------------------------------------- protocols


@pytest.mark.parametrize("parked_nbytes", [0, 4, 2**30])
def test_hardsync_sums_gradients_in_learner_order_whoever_came_first(
    parked_nbytes: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, 1e8 + 1 - 1e8 is 0 in this order and 1 in another: law 5 says which. With memory for so many kept ones."""
    monkeypatch.setattr("mpisgd.update.reception.PARKED_NBYTES", parked_nbytes)
    script = [
        *pulls(*EVERYBODY), (push(2), -1e8), (push(1), 1.0), *pulls(2, 1, clock=1), (push(0), 1e8), *pulls(0, clock=1),
        *byes({0: 1, 1: 1, 2: 1}),
    ]  # fmt: skip
    done = serve(log, script, HardsyncOptions(), 3, budget=6)
    assert done.rows("pushes", "learner_id", "clock", "staleness", "weight") == [(who, 0, 0, 1.0) for who in EVERYBODY]
    assert len(done.shard.update._spare) == min(2, parked_nbytes // 4)
    assert done.weights == [0.0]
    assert done.rows("updates", "clock", "gradients", "samples", "sum_sq") == [(1, 3, 6, 0.0)]
    assert read_table(log, "updates")["gradient_sq"] == pytest.approx((1e16 + 1.0 + 1e16) / 3)
    assert done.answers == [*(("weights", who, 0, [0.0]) for who in EVERYBODY), *(("stop", who, 1) for who in (2, 1, 0))]
    assert done.summary == (0, 1, 6, 3, 3, 0)


def test_softsync_measures_staleness_when_the_gradient_is_added(log: Path) -> None:
    """Three gradients of one timestamp: each of the first two makes an update before the next is added."""
    script = [*pulls(*EVERYBODY), *((push(who), 6.0) for who in EVERYBODY), *pulls(*EVERYBODY), *byes({0: 1, 1: 1, 2: 1})]
    done = serve(log, script, SoftsyncOptions(n=3), 3, budget=6)
    assert done.rows("pushes", "clock", "timestamp", "staleness", "weight") == [
        (0, 0, 0, 1.0), (1, 0, 1, 1.0), (2, 0, 2, 0.5)
    ]  # fmt: skip
    assert done.weights == [-6.0 - 6.0 - 3.0]
    assert [answer[:3] for answer in done.answers[3:]] == [("stop", who, 3) for who in EVERYBODY]


def test_softsync_answers_at_once_with_the_clock_it_has(log: Path) -> None:
    script = [
        *pulls(0, 1), (push(0), 2.0), *pulls(0), (push(0, seq=1), 4.0), *pulls(0), (push(1), 6.0), *pulls(1),
        Goodbye(0, 2, Ending.NONE), *byes({1: 1}, ending=Ending.NONE),
    ]  # fmt: skip
    done = serve(log, script, SoftsyncOptions(n=1), 2)
    assert done.answers == [
        ("weights", 0, 0, [0.0]), ("weights", 1, 0, [0.0]), ("weights", 0, 0, [0.0]), ("weights", 0, 1, [-3.0]),
        ("weights", 1, 1, [-3.0]),
    ]  # fmt: skip
    # the last gradient made the update when learner 0's leaving made one enough; it was one update old
    assert done.rows("pushes", "learner_id", "seq", "clock", "staleness") == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 1)]
    assert done.rows("updates", "clock", "gradients") == [(1, 2), (2, 1)]
    assert done.weights == [-9.0]


def test_backup_drops_who_is_late_and_gives_him_the_new_weights_at_once(log: Path) -> None:
    script = [
        *pulls(*EVERYBODY), (push(2), 2.0), *pulls(2, clock=1), (push(0), 4.0), (push(1), 1000.0), *pulls(1, clock=1),
        *pulls(0, clock=1), (push(1, 1, 1), 1.0), (push(0, 1, 1), 1.0), *pulls(0, 1, clock=2), (push(2, 1, 1), 1000.0),
        *pulls(2, clock=2), *byes({0: 2, 1: 2, 2: 2}),
    ]  # fmt: skip
    done = serve(log, script, BackupOptions(N=2), 3, budget=8)
    assert done.rows("pushes", "learner_id", "clock", "staleness", "verdict", "reason", "weight") == [
        (2, 0, 0, Verdict.APPLY, Reason.NONE, 1.0),
        (0, 0, 0, Verdict.APPLY, Reason.NONE, 1.0),
        (1, 1, 1, Verdict.DROP, Reason.STALE, 0.0),
        (1, 1, 0, Verdict.APPLY, Reason.NONE, 1.0),
        (0, 1, 0, Verdict.APPLY, Reason.NONE, 1.0),
        (2, 2, 1, Verdict.LATE, Reason.FINISHED, 0.0),
    ]
    assert done.weights == [-3.0 - 1.0]
    assert done.answers[3:] == [
        ("weights", 2, 1, [-3.0]), ("weights", 1, 1, [-3.0]), ("weights", 0, 1, [-3.0]), ("stop", 0, 2), ("stop", 1, 2),
        ("stop", 2, 2),
    ]  # fmt: skip
    assert done.summary == (0, 2, 8, 6, 6, 0)


# -------------------------------------------------------------------------------------------------------------- nonfinite


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_stop_ends_the_run_and_says_whose_gradient_it_was(gradient: float, loss: float, log: Path) -> None:
    script = [*pulls(0, 1), (push(1, seq=0, loss=loss), gradient)]
    message = rf"gradient of learner 1, mini-batch 0, clock 0, loss {loss}: not finite; lower alpha0 = 1, or set nonfinite"
    with pytest.raises(DivergenceError, match=message):
        serve(log, script, SoftsyncOptions(), 2)


def test_a_run_that_drops_everything_ends(tmp_path: Path) -> None:
    """Its samples would never reach the budget; one good gradient in between begins the count anew."""
    bad = [item for seq in range(20) for item in ((push(0, 0, seq), math.nan), *pulls(0))]
    good = [(push(0, 0, 20), 1.0), *pulls(0)]
    again = [item for seq in range(21, 42) for item in ((push(0, 1, seq), math.nan), *pulls(0))]
    with pytest.raises(DivergenceError, match="the last 21 gradients, all dropped, up to mini-batch 41"):
        serve(tmp_path / "log.h5", [*bad, *good, *again], SoftsyncOptions(), 1, nonfinite="drop")


@pytest.mark.parametrize("after", [[*pulls(0)], [(push(1, 0, 1), 1.0)], []], ids=["pull", "push", "end"])
def test_large_sums_are_checked_while_the_weights_are_under_way(
    tmp_path: Path, after: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next gradient is summed and before the run ends in order; whoever comes next, the run stops."""
    monkeypatch.setattr("mpisgd.update.slice_update.CACHED_NBYTES", 0)
    script = [*pulls(0, 1), (push(0), 1.0), (push(1), math.nan), *after, *byes({0: 1, 1: 1})]
    budget = 10**6 if after else 4
    with pytest.raises(DivergenceError, match=r"sum of the gradients of learners \[0, 1\] that made clock 1: not finite"):
        serve(tmp_path / "log.h5", script, SoftsyncOptions(), 2, budget=budget)


def test_drop_leaves_it_out_and_counts_it_out(log: Path) -> None:
    script = [
        *pulls(*EVERYBODY), (push(0), 2.0), (push(1), math.nan), (push(2), 4.0), *pulls(*EVERYBODY, clock=1),
        *byes({0: 1, 1: 1, 2: 1}),
    ]  # fmt: skip
    done = serve(log, script, HardsyncOptions(), 3, budget=4, nonfinite="drop")
    assert done.rows("pushes", "verdict", "reason", "weight") == [
        (Verdict.APPLY, Reason.NONE, 1.0), (Verdict.DROP, Reason.NONFINITE, 0.0), (Verdict.APPLY, Reason.NONE, 1.0)
    ]  # fmt: skip
    assert done.rows("updates", "gradients", "samples", "gradient_sq", "sum_sq") == [(2, 4, (4.0 + 16.0) / 2, 36.0)]
    assert done.weights == [-3.0]
    assert (int(Event.NONFINITE), 1) in done.rows("events", "kind", "learner_id")
    assert done.summary == (0, 1, 4, 3, 3, 0)


def test_an_update_of_which_all_was_dropped_goes_by_without_weights(log: Path) -> None:
    script = [
        *pulls(0, 1), (push(0), math.nan), (push(1), math.inf), *pulls(0, 1, clock=1), *byes({0: 1, 1: 1}, ending=Ending.NONE)
    ]  # fmt: skip
    done = serve(log, script, HardsyncOptions(), 2, nonfinite="drop")
    assert done.rows("updates", "clock", "gradients", "samples") == [(1, 0, 0)]
    for column in ("mean_loss", "gradient_sq", "sum_sq"):
        assert math.isnan(read_table(log, "updates")[column][0])
    assert [answer for answer in done.answers if answer[2] == 1] == [("weights", 0, 1, [0.0]), ("weights", 1, 1, [0.0])]


def test_continue_applies_it_and_reports_the_run_as_diverged(log: Path) -> None:
    script = [*pulls(0), (push(0), math.inf), *pulls(0), *byes({0: 1})]
    done = serve(log, script, SoftsyncOptions(), 1, budget=2, nonfinite="continue")
    assert done.weights == [-math.inf]
    assert done.rows("pushes", "verdict") == [(Verdict.APPLY,)]
    assert done.summary == (0, 1, 2, 1, 1, 1)


# ------------------------------------------------------------------------------------------------------- squared norms


@pytest.mark.parametrize("cached_nbytes", [0, 10**9])
@pytest.mark.parametrize("nonfinite", ["stop", "continue"])
def test_norms_are_of_the_gradients_that_were_summed(
    cached_nbytes: int, nonfinite: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that backup dropped in between, also where nobody looks at single gradients."""
    monkeypatch.setattr("mpisgd.update.norms.PASS_GRADIENTS", 0)
    monkeypatch.setattr("mpisgd.update.slice_update.CACHED_NBYTES", cached_nbytes)
    loss = 1.0 if nonfinite == "stop" else math.nan
    script = [
        *pulls(*EVERYBODY), (push(0), 2.0), (push(1), 4.0), *pulls(0, clock=1), (push(0, 1, 1), 1.0), (push(2), 1000.0),
        *pulls(1, clock=1), (push(1, 1, 1, loss=loss), 3.0), *pulls(0, 1, 2, clock=2), *byes({0: 2, 1: 2, 2: 1}),
    ]  # fmt: skip
    done = serve(log, script, BackupOptions(N=2), 3, budget=8, nonfinite=nonfinite)
    assert done.rows("updates", "gradient_sq", "sum_sq") == [(10.0, 36.0), (5.0, 16.0)]


# ---------------------------------------------------------------------------------------------------------------- the end


def test_late_pushes_are_drained_and_logged_but_not_applied(log: Path) -> None:
    script = [*pulls(0, 1), (push(0), 2.0), (push(1), 1000.0), (push(1, 1, 1), math.nan), *pulls(0, 1), *byes({0: 1, 1: 2})]
    done = serve(log, script, SoftsyncOptions(n=2), 2, budget=2)
    assert done.rows("pushes", "verdict", "reason") == [
        (Verdict.APPLY, Reason.NONE), (Verdict.LATE, Reason.FINISHED), (Verdict.LATE, Reason.FINISHED)
    ]  # fmt: skip
    assert (done.weights, done.summary) == ([-2.0], (0, 1, 2, 3, 3, 0))


def test_a_pull_that_waited_is_stopped_when_the_run_ends(log: Path) -> None:
    script = [*pulls(0, 1), (push(0), 2.0), Pull(0, 1), (push(1), 2.0), Pull(1, 1), *byes({0: 1, 1: 1})]
    done = serve(log, script, HardsyncOptions(), 2, budget=4)
    assert done.answers[2:] == [("stop", 0, 1), ("stop", 1, 1)]


def test_books_that_do_not_balance_fail_the_run(log: Path) -> None:
    script = [*pulls(0), (push(0), 2.0), *byes({0: 2})]
    with pytest.raises(ProtocolError, match="learner 0 says it pushed 2 gradients to this shard, which received 1"):
        serve(log, script, SoftsyncOptions(), 1)


@pytest.mark.parametrize("timestamp", [-1, 1, 2**40])
def test_a_timestamp_that_cannot_be_is_refused_and_nothing_is_applied(
    timestamp: int, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = ScriptedChannel([*pulls(0), (push(0, timestamp), 2.0)])
    shard, _ = make(log, channel, SoftsyncOptions(), 1)
    with pytest.raises(Stuck):
        shard.serve()
    assert f"learner 0 pushed timestamp {timestamp}: expected 0 ... 0, the shard's clock" in capsys.readouterr().err
    assert (shard.refusals.by_rank, shard.refusals.pushes) == ({1: 1}, [1])
    assert (shard.update.weights.item(), shard.update.gradients, shard.received, shard.rules.clock) == (0.0, 0, [0], 0)


@pytest.mark.parametrize("options", [HardsyncOptions(), BackupOptions(N=3, b=0), SoftsyncOptions(n=1)])
def test_who_leaves_early_lets_the_others_go_on(options: ProtocolOptions, log: Path) -> None:
    """Two have pushed and wait for the third, who leaves instead (TRAPS 1: 3 against 2 batches)."""
    clock = options.make(3).next_clock(0)
    script = [
        *pulls(*EVERYBODY), (push(0), 2.0), Pull(0, clock), (push(1), 4.0), Pull(1, clock), Goodbye(2, 0, Ending.NONE),
        *pulls(), *byes({0: 1, 1: 1}, ending=Ending.NONE),
    ]  # fmt: skip
    done = serve(log, script, options, 3)
    assert done.rows("updates", "clock", "gradients") == [(1, 2)]
    assert done.weights == [-3.0]
    if clock:
        assert done.answers[3:] == [("weights", 0, 1, [-3.0]), ("weights", 1, 1, [-3.0])]
    assert [row for row in done.rows("events", "kind", "learner_id") if row[0] == Event.DEPARTED] == [
        (Event.DEPARTED, who) for who in (2, 0, 1)
    ]


def test_who_may_begin_once_another_has_left_is_given_weights(log: Path) -> None:
    """No update is made by that: waiting pulls are looked at again at every departure."""
    script = [*pulls(1, 0), Goodbye(0, 0, Ending.NONE), (push(1), 2.0), *pulls(1), *byes({1: 1})]
    done = serve(log, script, AsyncOptions(warm_up=100), 2, budget=2)
    assert done.answers == [("weights", 0, 0, [0.0]), ("weights", 1, 0, [0.0]), ("stop", 1, 1)]


@pytest.mark.parametrize("options", [HardsyncOptions(), BackupOptions(N=2, b=0), SoftsyncOptions(n=2)])
def test_a_learner_that_another_shard_stopped_may_go_while_this_one_still_works(options: ProtocolOptions, log: Path) -> None:
    """This shard has dropped a slice more than the other and would go on; it must end with its learners, not wait for them."""
    clock = options.make(2).next_clock(0)
    script = [
        *pulls(0, 1), (push(0), math.nan), (push(1), 2.0), Pull(0, clock), Pull(1, clock), Goodbye(0, 1, Ending.FINISHED),
        *byes({1: 1}),
    ]  # fmt: skip
    done = serve(log, script, options, 2, budget=4, nonfinite="drop")
    assert done.summary == (0, 1, 2, 2, 2, 0)
    assert done.weights == [-2.0]


def test_a_shard_waits_for_every_goodbye_and_for_the_evaluators(log: Path) -> None:
    script = [*pulls(0), (push(0), 2.0), *pulls(0)]
    for last in ([], [LEAVE], [Goodbye(0, 1, Ending.FINISHED)]):
        with pytest.raises(Stuck):
            serve(log.with_suffix(f".{len(last)}{last and type(last[0]).__name__}"), [*script, *last], SoftsyncOptions(), 1)


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


# ---------------------------------------------------------------------------------------------------------------- the log


def test_every_row_of_a_short_run(log: Path) -> None:
    """Column by column; the channel's clock ticks one second whenever it is asked."""
    tenths = ("compute_ns", "delay_ns", "push_ns", "wait_ns", "pull_ns", "arrival_ns")
    details = {name: 100_000_000 * (1 + place) for place, name in enumerate(tenths)}
    script = [
        *pulls(0, 1), (push(1, 0, 0, loss=2.0, samples=2, **details), 4.0), *pulls(1), (push(0, 0, 0, loss=3.0), 1.0), *pulls(0),
        *byes({0: 1, 1: 1}),
    ]  # fmt: skip
    serve(log, script, SoftsyncOptions(n=2), 2, budget=4)
    rows = read_table(log, "pushes")
    names = schema.PUSHES.names or ()
    first = dict(zip(names, rows[0].tolist(), strict=True))
    assert first == pytest.approx({
        "shard": 0, "clock": 0, "timestamp": 0, "staleness": 0, "learner_id": 1, "seq": 0, "samples": 2, "gradients": 1,
        "verdict": Verdict.APPLY, "reason": Reason.NONE, "weight": 1.0, "learning_rate": 1.0, "arrival_s": 0.6, "answer_s": 7.0,
        "compute_s": 0.1, "delay_s": 0.2, "push_s": 0.3, "wait_s": 0.4, "pull_s": 0.5, "rounded": 0.25, "loss": 2.0,
    }, rel=1e-12)  # fmt: skip
    assert rows[["clock", "staleness", "learner_id", "loss"]][1].tolist() == (1, 1, 0, 3.0)
    assert math.isnan(rows["answer_s"][1])  # its pull was stopped, not answered
    updates = read_table(log, "updates")
    assert updates[list(schema.UPDATES.names or ())[:9]].tolist() == [
        (0, 1, 1, 2, 1.0, 6.0, 1.0, 2.0, 16.0),
        (0, 2, 1, 4, 1.0, 9.0, 1.0, 3.0, 1.0),
    ]
    assert np.isnan(updates["sum_sq"]).all()
    events = read_table(log, "events")
    assert np.isnan(events["value"][:3]).all()
    assert events["value"][3:].tolist() == [1.0, 1.0], "pushes, as learners count them"
    assert events[["shard", "clock", "kind", "learner_id"]].tolist() == [
        (0, 0, Event.STARTED, -1), (0, 0, Event.SNAPSHOT, -1), (0, 2, Event.STOPPED, -1), (0, 2, Event.GOODBYE, 0),
        (0, 2, Event.GOODBYE, 1)
    ]  # fmt: skip
    assert events["time_s"][:3].tolist() == [1.0, 2.0, 9.0]
    assert read_summary(log).tolist() == [(0, 2, 4, 2, 2, 0)]


class Noting(ScriptedChannel):
    """Notes the second at which each chunk is taken."""

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.taken_s: list[float] = []

    def add_chunk(self, chunk: np.ndarray) -> None:
        super().add_chunk(chunk)
        self.taken_s.append(self.seconds)


def test_weights_are_given_no_later_than_their_last_chunk_leaves(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it goes on at once: a later second, of a shard that waited for a core, would make the next push untrue."""
    monkeypatch.setattr("mpisgd.vectors.chunks.CHUNK_NBYTES", 4)
    script = [*pulls(0, 1), (push(1), 1.0), *pulls(1), (push(0), 1.0), *pulls(0), *byes({0: 1, 1: 1})]
    channel = Noting(script)
    serve(log, channel, SoftsyncOptions(n=2), 2, budget=4, weights=2)
    last_s = channel.taken_s[2 * 2 + 1]  # after two answers of the first weights, in two chunks each, those of the first update
    assert read_table(log, "pushes")["answer_s"][0] <= last_s
    assert read_table(log, "updates")["time_s"][0] <= last_s


# ------------------------------------------------------------------------------------------------------- random schedules

PROTOCOLS: dict[str, ProtocolOptions] = {
    "hardsync": HardsyncOptions(),
    "softsync n=1": SoftsyncOptions(n=1),
    "softsync n=3": SoftsyncOptions(n=3),
    "backup N=2": BackupOptions(N=2),
}


def gradient_of(learner_id: int, seq: int) -> float:
    return float(np.float32(math.sin(1 + 7 * learner_id + 31 * seq)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(PROTOCOLS)),
    seed=st.integers(0, 2**32),
    bad=st.sampled_from([0, 3, 7]),
    leave=st.dictionaries(st.integers(0, 3), st.integers(1, 4), max_size=4),
    weights=st.sampled_from([1, 3]),
)
def test_any_schedule_ends_with_balanced_books(
    name: str,
    seed: int,
    bad: int,
    leave: dict[int, int],
    weights: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes first, whoever leaves, whatever is dropped: nobody waits for ever, and every gradient is accounted for."""

    def gradient(learner_id: int, seq: int) -> float:
        return math.nan if bad and (learner_id + 5 * seq) % bad == 1 else gradient_of(learner_id, seq)

    monkeypatch.setattr("mpisgd.vectors.chunks.CHUNK_NBYTES", 4)  # several weights are several chunks
    options = PROTOCOLS[name]
    path = tmp_path_factory.mktemp("any") / "log.h5"
    crew = Crew(4, options.make(4).next_clock, gradient, seed=seed, leave=leave)
    crew.waiting.append(LEAVE)
    done = serve(path, crew, options, 4, budget=40, nonfinite="drop", weights=weights)
    pushes, updates = read_table(path, "pushes"), read_table(path, "updates")
    _, clock, samples, received, pushed, _ = done.summary
    assert received == pushed == len(pushes)
    assert len(updates) == clock
    applied = pushes[(pushes["verdict"] == Verdict.APPLY) & (pushes["clock"] < clock)]
    assert samples == applied["samples"].sum() == (updates["samples"].max() if clock else 0)
    assert updates["gradients"].sum() == len(applied)
    assert (pushes["staleness"] >= 0).all()
    assert samples >= 40 or len(leave) == 4
    for row in updates:
        assert row["gradients"] == np.count_nonzero(applied["clock"] == row["clock"] - 1)
    expected = -sum(
        np.mean([row["weight"] * gradient_of(row["learner_id"], row["seq"]) for row in rows])
        for each in range(clock)
        if len(rows := applied[applied["clock"] == each])
    )
    assert done.weights == pytest.approx([expected] * weights, abs=1e-4)


def test_hardsync_ends_with_the_same_bits_whatever_the_order_of_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = set()
    for seed in range(20):
        monkeypatch.setattr("mpisgd.update.reception.PARKED_NBYTES", [0, 4, 8, 2**30][seed % 4])
        crew = Crew(4, lambda timestamp: timestamp + 1, gradient_of, seed=seed)
        crew.waiting.append(LEAVE)
        ends.add(serve(tmp_path / f"{seed}.h5", crew, HardsyncOptions(), 4, budget=80).shard.update.weights.numpy().tobytes())
    assert len(ends) == 1


# -------------------------------------------------------------------------------------------------------------- time-outs


def test_after_a_time_out_fewer_gradients_are_enough(log: Path) -> None:
    """Two of three have come when the time is over; the third is late. The next time is over before anything has come."""
    script = [
        *pulls(*EVERYBODY), (push(0), 2.0), (push(1), 4.0), None, (push(2), 100.0), *pulls(*EVERYBODY, clock=1), None,
        (push(2, 1), 6.0), (push(0, 1), 8.0), *pulls(0, clock=2), *byes({0: 2, 1: 1, 2: 2}),
    ]  # fmt: skip
    done = serve(log, script, TimeoutOptions(N_min=2), 3, budget=8, timeout_s=5.0)
    assert done.rows("updates", "clock", "gradients", "samples") == [(1, 2, 4), (2, 2, 8)]
    assert done.rows("pushes", "learner_id", "clock", "verdict") == [
        (0, 0, Verdict.APPLY), (1, 0, Verdict.APPLY), (2, 1, Verdict.DROP), (2, 1, Verdict.APPLY), (0, 1, Verdict.APPLY)
    ]  # fmt: skip
    assert done.weights == [-3.0 - 7.0]
    over = [clock for kind, clock in done.rows("events", "kind", "clock") if kind == Event.TIMEOUT]
    assert over == [0, 1]


def test_no_time_is_over_once_all_learners_have_left(log: Path) -> None:
    """Another shard ended the run; what was summed here stays in flight, however long the evaluator takes."""
    script = [*pulls(*EVERYBODY), (push(0), 2.0), (push(1), 4.0), *byes({0: 1, 1: 1, 2: 0})[:-1], None, LEAVE]
    with pytest.raises(AssertionError, match="nobody asked for a time-out"):
        serve(log, script, TimeoutOptions(N_min=2), 3, timeout_s=5.0)


# --------------------------------------------------------------------------------------------- what another shard rejected


def test_a_mini_batch_that_was_applied_here_is_counted_but_not_applied_again(log: Path) -> None:
    """Learner 0's first mini-batch is pushed twice, for another shard rejected it: two pushes of clock 1 make update 2."""
    script = [
        *pulls(0, 1), (push(0, 0, 0), 2.0), *pulls(0), (push(0, 0, 1), 4.0), *pulls(0), (push(1, 0, 0), 100.0), *pulls(1),
        (push(0, 1, 1), 4.0), (push(1, 1, 0), 8.0), *pulls(0, 1), *byes({0: 3, 1: 2}, ending=Ending.NONE),
    ]  # fmt: skip
    done = serve(log, script, VersionedOptions(), 2)
    rows = done.rows("pushes", "learner_id", "seq", "clock", "verdict", "reason")
    assert rows[2] == (1, 0, 1, Verdict.REJECT, Reason.STALE)
    assert rows[3] == (0, 1, 1, Verdict.DROP, Reason.REPEATED)
    assert done.rows("updates", "clock", "gradients", "samples") == [(1, 2, 4), (2, 1, 6)]
    assert done.weights == [-3.0 - 8.0]


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
    shard, snapshots = make(log, crew, SoftsyncOptions(n=2), 3, budget=18, every_epochs=1.0)
    shard.records.checkpoints = noted = Noted(2, slow_at=3)  # type: ignore[assignment]
    shard.desk.is_open = False
    shard.serve()
    snapshots.close()
    pushes, events = read_table(log, "pushes"), read_table(log, "events")
    assert [each["clock"] for each in noted.taken] == [2, 4, 8], "not at 6, and not at the end"
    assert events["clock"][events["kind"] == Event.SKIPPED].tolist() == [6]
    assert events["clock"][events["kind"] == Event.CHECKPOINT].tolist() == [2, 4, 8]
    lost = events[events["kind"] == Event.UNSAVED]
    assert lost["value"].tolist() == [2, 8]
    assert lost["clock"].tolist() == [4, shard.rules.clock], "told at the next, or at the end"
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
    channel = ScriptedChannel(script)
    shard, snapshots = make(log, channel, options, 3, **fields)
    shard.records.checkpoints = noted = Noted(100)  # type: ignore[assignment]
    shard.serve()
    snapshots.close()
    shard.log.summary(-1, 0, 0, 0, False)
    return shard, noted, channel.answers


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
    script = [
        *pulls(0),
        (push(0), 1.0),
        Interrupt(10),
        Pull(0, 0),
        *byes({0: 1}),
    ]
    channel = ScriptedChannel(script)
    shard, snapshots = make(log, channel, SoftsyncOptions(n=1), 1, budget=2)
    shard.serve()
    snapshots.close()
    assert (shard.rules.interrupted, shard.rules.finished) == (False, True)
    assert tuple(read_summary(log)[0])[:3] == (0, 1, 2)


@pytest.mark.parametrize("parked_nbytes", [0, 2**30])
def test_an_ordered_sum_that_will_not_be_finished_is_left_as_it_is(
    log: Path, parked_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hardsync: learner 1's turn never comes, so what learner 2 has pushed is neither summed nor in the log."""
    monkeypatch.setattr("mpisgd.update.reception.PARKED_NBYTES", parked_nbytes)
    script: list[Any] = [
        *pulls(0, 2), (push(0), 1.0), Interrupt(15), Pull(1, 0), Pull(0, 1), Goodbye(1, 0, INTERRUPTED), (push(2), 1.0), Pull(2, 1),
        Goodbye(0, 1, INTERRUPTED), Goodbye(2, 1, INTERRUPTED), LEAVE,
    ]  # fmt: skip
    _, noted, answers = interrupted(log, script, HardsyncOptions())
    assert read_table(log, "pushes")["learner_id"].tolist() == [0]
    assert (noted.taken[0]["clock"], noted.taken[0]["received"], noted.taken[0]["next_seq"]) == (0, 0, [0, 0, 0])
    assert answers[-3:] == [("interrupted", 1, 0), ("interrupted", 0, 0), ("interrupted", 2, 0)]


def test_what_was_saved_is_not_saved_again(log: Path) -> None:
    script = [*DRAIN, *goodbyes(3, 1, 1)]
    channel = ScriptedChannel(script)
    shard, snapshots = make(log, channel, SoftsyncOptions(n=1), 3)
    shard.records.checkpoints = noted = Noted(1)  # type: ignore[assignment]
    shard.serve()
    snapshots.close()
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
    channel = ScriptedChannel(script)
    shard, snapshots = make(log, channel, SoftsyncOptions(n=2, modulation="none"), 2, budget=18)
    shard.update.samples = account.samples
    shard.restore(account, [4, 3])
    shard.serve()
    snapshots.close()
    rows = read_table(log, "pushes")[["learner_id", "seq", "clock", "verdict", "reason"]].tolist()
    applied, repeated = (Verdict.APPLY, Reason.NONE), (Verdict.DROP, Reason.REPEATED)
    assert rows == [(1, 3, 7, *repeated), (1, 4, 7, *repeated), (1, 5, 7, *applied), (0, 4, 8, *applied)]
    assert read_table(log, "events")["kind"].tolist() == [Event.RESUMED, Event.STOPPED, Event.GOODBYE, Event.GOODBYE]
    assert shard.update.weights.tolist() == [-2.0]
    assert tuple(read_summary(log)[0]) == (0, 9, 18, 13, 13, 0), "those before count"


def test_ssp_goes_on_from_where_learners_are() -> None:
    protocol = SspOptions(slack=1).make(3)
    protocol.on_resume([7, 5, 6])
    assert [protocol.may_pull(learner_id, 0) for learner_id in EVERYBODY] == [False, True, True]
    protocol.on_push(1, 0, 0)
    assert [protocol.may_pull(learner_id, 0) for learner_id in EVERYBODY] == [True, True, True]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (push(0, 0, 2), "pushed mini-batch 2: expected 0 ... 0, the next one"),
        (push(0, 0, 2**62), "pushed mini-batch"),
        (push(0, 0, 0, samples=0), "a gradient of 0 samples"),
        (push(0, 0, 0, samples=2**40), "samples"),
    ],
)
def test_a_push_that_cannot_be_changes_nothing_for_those_who_behave(
    bad: Push, why: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, its books are of what was taken, and what was refused is told and in the log."""
    script = [*pulls(0), (bad, 9.0), *[item for seq in range(3) for item in ((push(0, seq, seq), 1.0), *pulls(0))]]
    shard, _ = make(log, ScriptedChannel([*script, Goodbye(0, 3, Ending.NONE), SnapshotPull(NOTHING_MORE)]), SoftsyncOptions(), 1)
    shard.serve()
    assert why in capsys.readouterr().err
    assert shard.update.weights.item() == -3.0
    assert (shard.received, shard.pushed) == ([3], [3])
    events = read_table(log, "events")
    refused = events[events["kind"] == schema.Event.REFUSED]
    assert refused[["learner_id", "value"]].tolist() == [(0, 1.0)]


def test_who_waits_for_its_own_refused_push_ends_the_job(log: Path) -> None:
    """hardsync would wait for ever."""
    script = [*pulls(0), (push(0, 0, 5), 9.0), Pull(0, 1)]
    shard, _ = make(log, ScriptedChannel(script), HardsyncOptions(), 1)
    with pytest.raises(PeerError, match="learner 0 waits for an update after its push was refused: learner 0 pushed mini-batch 5"):
        shard.serve()


@pytest.mark.parametrize("samples", [0, -1, 2**31, 2**63 - 1])
def test_a_push_of_samples_that_the_log_has_no_room_for_is_refused(samples: int) -> None:
    refusals, wrong = Refusals(1), push(0, 0, 0, samples=samples)
    assert refusals.why_not(wrong, 0, fresh_only=False) == (
        f"learner 0 pushed a gradient of {samples} samples: expected 1 ... 2147483647"
    )
    assert refusals.why_not(push(0, 0, 0, samples=2**31 - 1), 0, fresh_only=False) == ""


def test_refusals_are_told_five_times(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = Refusals(1)
    for number in range(100):
        refusals.refuse(Refused(3, f"message {number}", push=False), -1)
    assert capsys.readouterr().err.count("\n") == 5
    assert (refusals.total, refusals.most, refusals.pushes) == (100, 3, [0])
