"""Timelines: exact spans from logs whose every number is known, valid traces, figures of small runs, errors of the command."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpisgd.analysis import timeline
from mpisgd.analysis.cycles import COMPUTE, DELAY, PULL, PUSH, WAIT
from mpisgd.analysis.timeline import Timeline, look
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event
from mpisgd.report import figures_timeline
from tests.unit import fabricate
from tests.unit.fabricate import PROTOCOLS, Log, evaluated, make, one_learner, row, rows, true_log


def of(found: Timeline, learner_id: int) -> np.ndarray:
    edges: np.ndarray = found.cycles.edges[found.cycles.learner_id == learner_id]
    return edges


# --------------------------------------------------------------------------------------------------------------- spans


def test_spans_of_a_log_by_hand(tmp_path: Path) -> None:
    found = look(make(tmp_path, one_learner(), 1))
    ms = (found.cycles.edges / 1e6).tolist()
    assert ms[0] == [0, 200, 300, 1300, 1300, 1800, 2100]  # 0.1 s before the first wait is in no row: all of it may be 0.2 s later
    assert ms[1] == [2250, 2400, 2500, 3500, 3500, 3500, 3600]  # known from the answer, and with it the 0.15 s of no row before it
    assert (found.cycles.slack / 1e6).tolist() == [200, 100]
    assert found.cycles.known.tolist() == [True, False]
    assert ((found.updates.start / 1e6).tolist(), (found.updates.end / 1e6).tolist()) == ([2250], [2300])
    assert found.update.tolist() == [0, -1]  # the second push is applied, but its update never came
    assert (found.window.start, found.window.end) == (0, 3_600_000_000)
    assert "up to 150 ms later (median; 99th percentile: 199 ms)" in found.slack()


def test_a_long_queue_shows_in_the_push(tmp_path: Path) -> None:
    """Of a push taken after long waiting, the arrival is late; the answer before it, and its length, tell when it began."""
    log = one_learner()
    log.pushes["arrival_s"][1] = 13.6
    assert (look(make(tmp_path, log, 1)).cycles.edges[1, PUSH:] / 1e6).tolist() == [3500, 13600]


def test_what_is_not_known_of_one_push_follows_from_others(tmp_path: Path) -> None:
    log = one_learner()
    log.pushes["push_s"][1] = 0.05  # so the first push began at 1.95 s or later, for it ended after its arrival
    log.pushes["answer_s"][0] = np.nan
    found = look(make(tmp_path, log, 1))
    assert (found.cycles.edges[:, PUSH] / 1e6).tolist() == [1950, 3250]
    assert (found.cycles.edges[1, 0] / 1e6, found.cycles.edges[0, -1] / 1e6) == (2000, 2000)


def test_an_answer_bounds_the_push_before_it(tmp_path: Path) -> None:
    log = one_learner()
    log.pushes["arrival_s"] = 2.15, 4.0
    found = look(make(tmp_path, log, 1))
    assert (found.cycles.edges[:, PUSH] / 1e6).tolist() == [1850, 3500]
    assert (found.cycles.slack / 1e6).tolist() == [250, 500]  # the first was over at 2.4 s


def test_learners_do_not_bear_on_one_another(tmp_path: Path) -> None:
    """Of a run under way, a learner's last push may have been answered already."""
    log = one_learner()
    log.pushes["answer_s"][1] = 3.7
    other = log.pushes.copy()
    other["learner_id"] = 1
    found = look(make(tmp_path, Log(pushes=np.concatenate([other, log.pushes])), 2, ended=False))
    assert of(found, 1).tolist() == of(found, 0).tolist()
    assert of(found, 0)[0].tolist() == [0, 200_000_000, 300_000_000, *[1_300_000_000] * 2, 1_800_000_000, 2_100_000_000]


def test_updates_that_touch_do_not_overlap_by_rounding(tmp_path: Path) -> None:
    log = one_learner()
    touching = [
        row("updates", clock=1, time_s=1.0 + 4e-10, update_s=0.5),
        row("updates", clock=2, time_s=2.0, update_s=1.0 + 6e-10),
    ]
    log.updates = rows("updates", touching)
    assert look(make(tmp_path, log, 1)).updates.start.tolist() == [500_000_000, 1_000_000_000]


def test_no_push_begins_after_its_arrival_whatever_the_log_says(tmp_path: Path) -> None:
    log = one_learner()
    log.pushes["answer_s"][0] = 3.0  # the clocks of shard and learner are apart
    found = look(make(tmp_path, log, 1))
    assert (found.cycles.edges[:, PUSH] / 1e6).tolist() == [1800, 3600]
    assert (np.diff(found.cycles.edges[1]) / 1e6).tolist() == [150, 100, 1000, 0, 0, 0]
    log.pushes["arrival_s"] -= 0.3  # and what was before shard 0's clock began is cut off
    assert (look(make(tmp_path / "earlier", log, 1)).cycles.edges[0] / 1e6).tolist() == [0, 100, 200, 1200, 1200, 1700, 2000]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shards", [1, 3])
def test_the_truth_lies_between_what_is_drawn_and_its_slack(tmp_path: Path, seed: int, shards: int) -> None:
    log, begin, end = true_log(seed, shards=shards)
    found = look(make(tmp_path, log, 3, shards=shards))
    drawn, slack = found.cycles.edges[:, PUSH].reshape(3, -1), found.cycles.slack.reshape(3, -1)
    truth = np.rint(1e9 * begin).astype(np.int64)
    rounded = 400  # nanoseconds: each duration is rounded, and they add up
    assert np.all(drawn <= truth + rounded)
    assert np.all(truth <= drawn + slack + rounded)
    assert np.all(slack >= 0)
    lengths = found.cycles.edges[:, -1].reshape(3, -1) - drawn
    assert lengths[:, :-1] == pytest.approx(1e9 * (end - begin)[:, :-1], abs=rounded)
    assert np.all(lengths[:, -1] <= 1e9 * (end - begin)[:, -1] + slack[:, -1] + rounded)


def test_a_shards_clock_is_moved_only_as_far_as_its_log_demands(tmp_path: Path) -> None:
    log, _, _ = true_log(1)
    straight = look(make(tmp_path, log, 3, shards=2))
    assert straight.notes == ()
    late = log.pushes["shard"] == 1
    for name in ("arrival_s", "answer_s"):
        log.pushes[name][late] -= 0.5
    log.updates = rows("updates", [row("updates", shard=1, clock=1, gradients=1, time_s=0.25, update_s=0.25)])
    log.events = rows("events", [row("events", shard=shard, kind=Event.STOPPED, time_s=1.0) for shard in range(2)])
    moved = look(make(tmp_path / "moved", log, 3, shards=2))
    (note,) = moved.notes
    assert note.startswith("moved, as these shards left the start barrier before or after shard 0: shard 1 by +")
    by = int(moved.updates.end[0]) - 250_000_000
    assert by == pytest.approx(500_000_000, abs=1_000_000)  # as the shortest pushes tell
    assert moved.moment.tolist() == [1_000_000_000, 1_000_000_000 + by]
    assert moved.cycles.edges[:, PUSH] == pytest.approx(straight.cycles.edges[:, PUSH], abs=1_000_000)
    assert np.all(moved.cycles.edges[moved.cycle, PUSH] <= moved.arrival)


@pytest.mark.parametrize(("way", "apart_s", "by_s"), [("streamed", 0.3, 0.3), ("streamed", 0.005, 0.0), ("whole", 0.3, 0.0)])
def test_headers_of_a_streamed_push_arrive_at_once(tmp_path: Path, way: str, apart_s: float, by_s: float) -> None:
    """Though long pushes would leave room for other clocks."""
    log, _, _ = true_log(1)
    log.pushes["push_s"] += 0.8
    on = [log.pushes[log.pushes["shard"] == shard] for shard in range(2)]
    first = {(each["learner_id"], each["seq"]): each["arrival_s"] for each in on[0]}
    late = log.pushes["shard"] == 1
    log.pushes["arrival_s"][late] = [first[each["learner_id"], each["seq"]] - apart_s for each in on[1]]
    found = look(make(tmp_path, log, 3, shards=2, environment={"way": way}))
    moved = [note for note in found.notes if "shard 1 by" in note]
    assert len(moved) == (by_s > 0) and all("by +300 ms" in note for note in moved)


@pytest.mark.parametrize(("name", "wanted"), PROTOCOLS)
@pytest.mark.parametrize("shards", [1, 2])
def test_durations_are_exact_and_spans_in_order(tmp_path: Path, name: str, wanted: int, shards: int) -> None:
    log = fabricate.simulated(name, learners=5, wanted=wanted, updates=20, shards=shards)
    run = make(tmp_path, log, 5, shards=shards, protocol={"name": name})
    found = look(run)
    assert len(found.cycles.row) * shards == len(run.pushes)
    for learner_id in range(5):
        own = run.pushes[(run.pushes["learner_id"] == learner_id) & (run.pushes["shard"] == 0)]
        edges = of(found, learner_id)
        lengths = np.diff(edges)
        for at, activity in ((WAIT, "wait"), (PULL, "pull"), (COMPUTE, "compute"), (DELAY, "delay")):
            assert lengths[1:, at] == pytest.approx(1e9 * own[f"{activity}_s"][1:], abs=1)
        assert lengths[:-1, PUSH] == pytest.approx(1e9 * own["push_s"][1:], abs=1)
        assert np.all(np.diff(edges.ravel()) >= 0)
        assert np.all(edges[:, PUSH] <= np.rint(1e9 * own["arrival_s"]))


def test_shards_that_logged_less(tmp_path: Path) -> None:
    """Of a run that was killed, one shard's last rows are not there; a mini-batch is the same on both where it is."""
    log = fabricate.simulated("softsync", learners=3, wanted=1, updates=20, shards=2)
    log.pushes = log.pushes[:-7]
    run = make(tmp_path, log, 3, shards=2, ended=False)
    found = look(run)
    assert len(found.cycles.row) == np.count_nonzero(run.pushes["shard"] == 0)
    assert np.all(found.pushes["seq"] == found.pushes["seq"][found.cycles.row[found.cycle]])


def test_attempts_with_clocks_of_their_own_are_refused(tmp_path: Path) -> None:
    log = one_learner()
    log.pushes["arrival_s"] = [3.6, 2.0]
    run = make(tmp_path, log, 1)
    with pytest.raises(
        DataError, match="mini-batch 1 of learner 0 arrived on shard 0 before the preceding mini-batch; does the log hold"
    ):
        look(run)
    assert "several attempts" in figures_timeline.drawing(run).missing


# --------------------------------------------------------------------------------------------------------- evaluations


def test_evaluations_follow_one_another(tmp_path: Path) -> None:
    run = make(tmp_path, evaluated(one_learner()), 1, evaluator=True, environment={"evaluator_rank": 2})
    found = look(run)
    assert (found.evaluations.start / 1e6).tolist() == [0, 700, 1400, 2100]
    assert (found.evaluations.end / 1e6).tolist() == [700, 1400, 2100, 2800]
    assert found.ranks.dedicated_evaluator


def test_without_an_evaluator_learner_0_evaluates_at_the_end(tmp_path: Path) -> None:
    found = look(make(tmp_path, evaluated(one_learner()), 1))
    assert (found.evaluations.start / 1e6).tolist() == [3600, 4300, 5000, 5700]
    assert found.ranks.evaluator == found.ranks.learners[0] == 1


def test_in_a_fault_tolerant_run_shard_0_evaluates_when_learners_have_left(tmp_path: Path) -> None:
    run = make(tmp_path, evaluated(one_learner()), 1, evaluator=True)
    with h5py.File(run.path / schema.evaluator_file(), "r+") as file:
        file.attrs["appointed"] = 1
    found = look(run)
    assert found.ranks.evaluator == found.ranks.shards[0] == 0
    assert (found.evaluations.start / 1e6).tolist() == [3600, 4300, 5000, 5700]
    assert found.names == {0: "shard 0", 1: "learner 0"}


# ------------------------------------------------------------------------------------------------------------- windows


def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, fabricate.simulated("softsync", learners=6, wanted=1, updates=100), 6)
    monkeypatch.setattr(timeline, "MOST_PUSHES", 10)
    monkeypatch.setattr(timeline, "MOST_LEARNERS", 4)
    found = look(run)
    arrivals, end = np.sort(found.arrival), int(found.cycles.edges.max())
    assert (found.window.start, found.window.end) == (0, arrivals[9])
    cut, learners = sorted(found.notes)
    assert cut == f"0 s to {arrivals[9] / 1e9:g} s of {end / 1e9:g} s, 10 pushes; choose by --from-s, --to-s"
    assert learners == "learners 0 to 3 of 6; choose their number by --learners"
    whole = look(run, learners=6, to_s=np.inf)
    assert whole.notes == ()
    assert whole.window.end == whole.cycles.edges.max()
    part = look(run, from_s=0.2, to_s=0.3, learners=6)
    assert part.cycles.edges.tolist() == whole.cycles.edges.tolist()  # a window does not move what it shows
    late = look(run, from_s=0.2, learners=6)
    assert late.window.end == np.sort(late.arrival[late.arrival >= 200_000_000])[9]
