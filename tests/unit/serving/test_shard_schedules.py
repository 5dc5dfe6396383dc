"""A shard's loop before learners that come in any order, too late, again, or with what cannot be (DESIGN 4)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import Ending, Pull, Push, Refused
from mpisgd.protocols import (
    BackupOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.serving.refusals import Refusals
from tests.effort import examples, thinned
from tests.unit.shards import EVERYBODY, LEAVE, Crew, byes, pulls, push, serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


# ------------------------------------------------------------------------------------------------------- random schedules

PROTOCOLS: dict[str, ProtocolOptions] = {
    "hardsync": HardsyncOptions(),
    "softsync n=1": SoftsyncOptions(n=1),
    "softsync n=3": SoftsyncOptions(n=3),
    "backup N=2": BackupOptions(N=2),
}


def gradient_of(learner_id: int, seq: int) -> float:
    return float(np.float32(math.sin(1 + 7 * learner_id + 31 * seq)))


@pytest.mark.deeper
@settings(max_examples=examples(240, of=12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.deeper
def test_hardsync_ends_with_the_same_bits_whatever_the_order_of_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = set()
    for seed in thinned(range(20), 3):
        monkeypatch.setattr("mpisgd.vectors.body.PARKED_NBYTES", [0, 4, 8, 2**30][seed % 4])
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


# -------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (push(0, 0, 2), "pushed mini-batch 2: expected 0 ... 0, the next mini-batch"),
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
    done = serve(log, [*script, *byes({0: 3}, Ending.NONE)], SoftsyncOptions(), 1)
    assert why in capsys.readouterr().err
    assert done.weights == [-3.0]
    assert (done.shard.received, done.shard.pushed) == ([3], [3])
    events = read_table(log, "events")
    refused = events[events["kind"] == schema.Event.REFUSED]
    assert refused[["learner_id", "value"]].tolist() == [(0, 1.0)]


def test_who_waits_for_its_own_refused_push_ends_the_job(log: Path) -> None:
    """hardsync would wait for ever."""
    script = [*pulls(0), (push(0, 0, 5), 9.0), Pull(0, 1)]
    with pytest.raises(PeerError, match="learner 0 waits for an update after a refused push: learner 0 pushed mini-batch 5"):
        serve(log, script, HardsyncOptions(), 1)


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
