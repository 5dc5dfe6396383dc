"""A shard's loop before scripted and well-behaved learners: verdicts, answers, the end, and every row of the log (DESIGN 4)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import DivergenceError, ProtocolError
from mpisgd.comm.messages import Ending, Goodbye, Pull
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
)
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.schema import Event, Reason, Verdict
from tests.unit.fakes import Stuck
from tests.unit.shards import EVERYBODY, LEAVE, ScriptedChannel, Served, byes, pulls, push, serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


# -------------------------------------------------------------------------------------------------------------- protocols


@pytest.mark.parametrize("parked_nbytes", [0, 4, 2**30])
def test_hardsync_sums_gradients_in_learner_order_whoever_came_first(
    parked_nbytes: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, 1e8 + 1 - 1e8 is 0 in this order and 1 in another: law 5 says which. With memory for so many kept ones."""
    monkeypatch.setattr("mpisgd.vectors.body.PARKED_NBYTES", parked_nbytes)
    script = [
        *pulls(*EVERYBODY), (push(2), -1e8), (push(1), 1.0), *pulls(2, 1, clock=1), (push(0), 1e8), *pulls(0, clock=1),
        *byes({0: 1, 1: 1, 2: 1}),
    ]  # fmt: skip
    done = serve(log, script, HardsyncOptions(), 3, budget=6)
    assert done.rows("pushes", "learner_id", "clock", "staleness", "weight") == [(who, 0, 0, 1.0) for who in EVERYBODY]
    assert done.shard.update.bodies.made == 2 + min(1, parked_nbytes // 4)
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


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (math.nan, math.nan), (1.0, math.inf)])
def test_stop_ends_the_run_and_says_whose_gradient_it_was(gradient: float, loss: float, log: Path) -> None:
    script = [*pulls(0, 1), (push(1, seq=0, loss=loss), gradient)]
    message = rf"gradient of learner 1, mini-batch 0, clock 0, loss {loss}: not finite; lower alpha0 = 1, or set nonfinite"
    with pytest.raises(DivergenceError, match=message):
        serve(log, script, SoftsyncOptions(), 2)


def test_a_loss_of_nothing_is_told_apart_from_divergence(log: Path) -> None:
    """Its gradient is finite: where all targets of a mini-batch are ignored, torch's cross entropy is 0 / 0."""
    script = [*pulls(0, 1), (push(1, seq=0, loss=math.nan), 1.0)]
    with pytest.raises(DivergenceError, match=r"mini-batch 0, clock 0, loss nan: .* the gradient is: are all targets"):
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
    with pytest.raises(ProtocolError, match="learner 0 says 2 gradients pushed to this shard, the shard received 1"):
        serve(log, script, SoftsyncOptions(), 1)


@pytest.mark.parametrize("timestamp", [-1, 1, 2**40])
def test_a_timestamp_that_cannot_be_is_refused_and_nothing_is_applied(
    timestamp: int, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = (served := Served(log, [*pulls(0), (push(0, timestamp), 2.0)], SoftsyncOptions(), 1)).shard
    with pytest.raises(Stuck):
        served.run()
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
