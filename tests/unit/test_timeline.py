"""Timelines: exact spans from logs whose every number is known, valid traces, figures of small runs, errors of the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis import timeline
from mpisgd.analysis.cycles import COMPUTE, DELAY, PULL, PUSH, WAIT
from mpisgd.analysis.timeline import Timeline, look
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.reading import timeline as command
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.report import chrome_trace, figures_time, figures_timeline
from mpisgd.report import single as report
from mpisgd.report.look import WIDTH_IN
from tests.unit import fabricate, logs_by_hand
from tests.unit.fabricate import Log, row, rows

SOFTSYNC = {"name": "softsync", "n": 1}
PROTOCOLS = [("hardsync", 5), ("softsync", 2), ("backup", 4)]


def make(path: Path, log: Log, learners: int, **options: Any) -> Run:
    return Run(fabricate.write_run(path / "run", log, options.pop("protocol", SOFTSYNC), learners, **options))


def by_hand() -> Log:
    """One learner, one shard. In truth: prepares until 0.1 s, waits until 0.3, pulls until 0.4, computes until 1.4, is delayed
    until 1.9, pushes until 2.2, prepares until 2.25, waits until 2.4, pulls until 2.5, computes until 3.5, pushes."""
    first = {"arrival_s": 2.0, "answer_s": 2.4, "wait_s": 0.2, "pull_s": 0.1, "compute_s": 1.0, "delay_s": 0.5, "loss": np.nan}
    second = {"arrival_s": 3.6, "push_s": 0.3, "wait_s": 0.15, "pull_s": 0.1, "compute_s": 1.0, "seq": 1, "loss": 0.5}
    return Log(
        pushes=rows("pushes", [row("pushes", **first), row("pushes", **second, clock=1, timestamp=1)]),
        updates=rows("updates", [row("updates", clock=1, gradients=1, samples=4, time_s=2.3, update_s=0.05, mean_loss=np.nan)]),
    )


def true_log(seed: int, learners: int = 3, shards: int = 2, pushes: int = 30) -> tuple[Log, np.ndarray, np.ndarray]:
    """A log whose truth is known: (log, begin of each push, its end), the latter two (learners, pushes) in seconds.

    Pushes queue for long or not at all, answers take their time to arrive, and the learner does things that no row tells of.
    """
    random = np.random.default_rng(seed)
    some = [0.0, 1e-6, 1e-3, 0.02]

    def take() -> float:
        return float(random.choice(some) * random.random())

    begin, end, table = np.zeros((learners, pushes)), np.zeros((learners, pushes)), []
    for learner_id in range(learners):
        now, push = 0.0, 0.0
        for at in range(pushes):
            now += take()
            asked = now
            answers = [asked + take() for _ in range(shards)]
            for old, moment in zip(table[len(table) - shards :] if at else [], answers, strict=False):
                old["answer_s"] = moment
            began = answers[0] + take()
            ended = max([began, *answers]) + take()
            compute, delay = 0.01 + take(), take()
            begin[learner_id, at] = ended + compute + delay
            arrivals = [begin[learner_id, at] + take() for _ in range(shards)]
            told = {"learner_id": learner_id, "seq": at, "wait_s": began - asked, "pull_s": ended - began, "push_s": push}
            for shard, arrival_s in enumerate(arrivals):
                more = {"shard": shard, "arrival_s": arrival_s, "compute_s": compute, "delay_s": delay}
                table.append(row("pushes", **told, **more))
            now = end[learner_id, at] = max(arrivals) + take()
            push = now - begin[learner_id, at]
    log = rows("pushes", table)
    return Log(pushes=log[np.argsort(log["arrival_s"], kind="stable")]), begin, end


def overlaps(spans: Sequence[tuple[int, int]]) -> list[Any]:
    ordered = sorted(spans)
    return [(one, other) for one, other in itertools.pairwise(ordered) if one[1] > other[0] or one[0] > one[1]]


def of(found: Timeline, learner_id: int) -> np.ndarray:
    return found.cycles.edges[found.cycles.learner_id == learner_id]


# --------------------------------------------------------------------------------------------------------------- spans


def test_spans_of_a_log_by_hand(tmp_path: Path) -> None:
    found = look(make(tmp_path, by_hand(), 1))
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
    log = by_hand()
    log.pushes["arrival_s"][1] = 13.6
    assert (look(make(tmp_path, log, 1)).cycles.edges[1, PUSH:] / 1e6).tolist() == [3500, 13600]


def test_what_is_not_known_of_one_push_follows_from_others(tmp_path: Path) -> None:
    log = by_hand()
    log.pushes["push_s"][1] = 0.05  # so the first push began at 1.95 s or later, for it ended after its arrival
    log.pushes["answer_s"][0] = np.nan
    found = look(make(tmp_path, log, 1))
    assert (found.cycles.edges[:, PUSH] / 1e6).tolist() == [1950, 3250]
    assert (found.cycles.edges[1, 0] / 1e6, found.cycles.edges[0, -1] / 1e6) == (2000, 2000)


def test_an_answer_bounds_the_push_before_it(tmp_path: Path) -> None:
    log = by_hand()
    log.pushes["arrival_s"] = 2.15, 4.0
    found = look(make(tmp_path, log, 1))
    assert (found.cycles.edges[:, PUSH] / 1e6).tolist() == [1850, 3500]
    assert (found.cycles.slack / 1e6).tolist() == [250, 500]  # the first was over at 2.4 s


def test_learners_do_not_bear_on_one_another(tmp_path: Path) -> None:
    """Of a run under way, a learner's last push may have been answered already."""
    log = by_hand()
    log.pushes["answer_s"][1] = 3.7
    other = log.pushes.copy()
    other["learner_id"] = 1
    found = look(make(tmp_path, Log(pushes=np.concatenate([other, log.pushes])), 2, ended=False))
    assert of(found, 1).tolist() == of(found, 0).tolist()
    assert of(found, 0)[0].tolist() == [0, 200_000_000, 300_000_000, *[1_300_000_000] * 2, 1_800_000_000, 2_100_000_000]


def test_updates_that_touch_do_not_overlap_by_rounding(tmp_path: Path) -> None:
    log = by_hand()
    touching = [
        row("updates", clock=1, time_s=1.0 + 4e-10, update_s=0.5),
        row("updates", clock=2, time_s=2.0, update_s=1.0 + 6e-10),
    ]
    log.updates = rows("updates", touching)
    assert look(make(tmp_path, log, 1)).updates.start.tolist() == [500_000_000, 1_000_000_000]


def test_no_push_begins_after_its_arrival_whatever_the_log_says(tmp_path: Path) -> None:
    log = by_hand()
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
    log = by_hand()
    log.pushes["arrival_s"] = [3.6, 2.0]
    run = make(tmp_path, log, 1)
    with pytest.raises(DataError, match="mini-batch 1 of learner 0 arrived on shard 0 before the one before it; does the log hold"):
        look(run)
    assert "several attempts" in figures_timeline.drawing(run).missing


# --------------------------------------------------------------------------------------------------------- evaluations


def evaluated(log: Log) -> Log:
    """Two snapshots, of 0 and 1 s, each evaluated on test and training data in 0.7 s."""
    log.evaluations = rows(
        "evaluations",
        [row("evaluations", snapshot=at, taken_s=at, train=train, evaluate_s=0.7, error=0.5) for at in (0, 1) for train in (0, 1)],
    )
    return log


def test_evaluations_follow_one_another(tmp_path: Path) -> None:
    run = make(tmp_path, evaluated(by_hand()), 1, evaluator=True, environment={"evaluator_rank": 2})
    found = look(run)
    assert (found.evaluations.start / 1e6).tolist() == [0, 700, 1400, 2100]
    assert (found.evaluations.end / 1e6).tolist() == [700, 1400, 2100, 2800]
    assert found.ranks.dedicated_evaluator


def test_without_an_evaluator_learner_0_evaluates_at_the_end(tmp_path: Path) -> None:
    found = look(make(tmp_path, evaluated(by_hand()), 1))
    assert (found.evaluations.start / 1e6).tolist() == [3600, 4300, 5000, 5700]
    assert found.ranks.evaluator == found.ranks.learners[0] == 1


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


# --------------------------------------------------------------------------------------------------------------- trace


def trace(path: Path, run: Run, **window: Any) -> list[dict[str, Any]]:
    """The events of a trace; json, strictly."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    count = chrome_trace.write(path / "trace.json", look(run, **window), {"run": run.name})
    read = json.loads((path / "trace.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert read["displayTimeUnit"] == "ms"
    assert read["otherData"] == {"run": run.name}
    assert len(read["traceEvents"]) == count
    return list(read["traceEvents"])


def check_format(events: list[dict[str, Any]]) -> None:
    """What the Trace Event Format requires, and that spans of one thread never overlap."""
    more = {
        "X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}, "s": {"id"}, "f": {"id", "bp"},
    }  # fmt: skip
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    flows: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        phase = event["ph"]
        assert {"name", "cat", "ph", "pid", "tid", "ts"} | more[phase] <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if phase == "X":
            start = round(1e3 * event["ts"])
            spans.setdefault((event["pid"], event["tid"]), []).append((start, start + round(1e3 * event["dur"])))
        elif phase == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        elif phase in flows:
            assert event["id"] not in flows[phase]
            flows[phase][event["id"]] = event
    assert all(overlaps(own) == [] for own in spans.values())
    assert set(flows["s"]) == set(flows["f"])
    for number, start in flows["s"].items():
        end = flows["f"][number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        for bound in (start, end):  # an arrow binds to the slice that it lies in
            moment = round(1e3 * bound["ts"])
            assert any(one <= moment <= other for one, other in spans[bound["pid"], bound["tid"]])
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} == named


def test_a_trace_by_hand(tmp_path: Path) -> None:
    log = by_hand()
    log.events = rows(
        "events",
        [
            row("events", kind=Event.STARTED, learner_id=-1, time_s=0.0, value=np.nan),
            row("events", kind=Event.DEPARTED, learner_id=0, time_s=3.7, clock=1, value=np.inf),
            row("events", kind=99, learner_id=-1, time_s=3.8),
        ],
    )
    run = make(tmp_path, log, 1)
    run.events["shard"][2] = -1  # the evaluator's, which is learner 0's rank here
    events = trace(tmp_path, run)
    check_format(events)
    shown = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [(event["name"], event["ts"], event["dur"]) for event in shown] == [
        ("wait", 0.0, 200_000.0),
        ("pull", 200_000.0, 100_000.0),
        ("compute", 300_000.0, 1_000_000.0),
        ("injected delay", 1_300_000.0, 500_000.0),
        ("push", 1_800_000.0, 300_000.0),
        ("wait", 2_250_000.0, 150_000.0),
        ("pull", 2_400_000.0, 100_000.0),
        ("compute", 2_500_000.0, 1_000_000.0),
        ("push", 3_500_000.0, 100_000.0),
    ]
    assert shown[2]["args"] == {"seq": 0, "timestamp": 0, "samples": 4, "loss": None}
    assert shown[-1]["args"] == {"seq": 1, "timestamp": 1, "samples": 4, "loss": 0.5, "length": "not logged: at least"}
    (update,) = [event for event in events if event["name"] == "update"]
    assert (update["tid"], update["ts"], update["dur"]) == (0, 2_250_000.0, 50_000.0)
    assert update["args"]["mean_staleness"] == 0
    instants = [(event["name"], event["tid"], event["ts"]) for event in events if event["ph"] == "i"]
    assert instants == [
        ("apply τ=0", 0, 2_000_000.0),
        ("apply τ=0", 0, 3_600_000.0),
        ("answer", 0, 2_400_000.0),
        ("started", 0, 0.0),
        ("departed", 0, 3_700_000.0),
        ("event 99", 1, 3_800_000.0),
    ]
    counters = {(event["name"], event["ts"]): event["args"] for event in events if event["ph"] == "C"}
    assert counters == {("shard 0 clock", 2_300_000.0): {"updates": 1}, ("shard 0 staleness", 2_300_000.0): {"mean": 0.0}}
    arrows = [(event["ph"], event["tid"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 1, 1_800_000.0), ("f", 0, 2_250_000.0)]


def test_hosts_are_processes_and_ranks_threads(tmp_path: Path) -> None:
    environment = {"shard_ranks": [0, 2], "evaluator_rank": 4, "hosts": ['n"1"', 'n"1"', "n2", "n2", "n2"]}
    log = evaluated(logs_by_hand.softsync(2))
    events = trace(tmp_path, make(tmp_path, log, 2, shards=2, evaluator=True, environment=environment))
    check_format(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {event["tid"]: (event["args"]["name"], event["pid"]) for event in events if event["name"] == "thread_name"}
    assert processes == {5: 'n"1"', 6: "n2"}  # no thread has the number of a process
    assert threads == {0: ("shard 0", 5), 2: ("shard 1", 6), 4: ("evaluator", 6), 1: ("learner 0", 5), 3: ("learner 1", 6)}
    order = sorted((event["args"]["sort_index"], event["tid"]) for event in events if event["name"] == "thread_sort_index")
    assert [rank for _, rank in order] == [0, 2, 4, 1, 3]
    assert {event["tid"] for event in events if event["name"] == "evaluate"} == {4}
    late = [event for event in events if event["name"] == "late τ=1"]
    assert [event["args"]["reason"] for event in late] == ["finished", "finished"]


@pytest.mark.parametrize(("name", "wanted"), PROTOCOLS)
@pytest.mark.parametrize("shards", [1, 3])
def test_traces_of_simulated_runs(tmp_path: Path, name: str, wanted: int, shards: int) -> None:
    log = fabricate.simulated(name, learners=5, wanted=wanted, updates=20, shards=shards)
    log.evaluations = fabricate.learning(log)
    log.evaluations["evaluate_s"] = 0.05
    run = make(tmp_path, log, 5, shards=shards, protocol={"name": name})
    events = trace(tmp_path, run)
    check_format(events)
    applied = (run.pushes["verdict"] == Verdict.APPLY) & (run.pushes["clock"] < 20)
    assert sum(event["ph"] == "s" for event in events) == np.count_nonzero(applied)
    assert sum(event["name"] == "compute" for event in events) * shards == len(run.pushes)
    assert sum(event["name"] == "update" for event in events) == 20 * shards
    dropped = sum(event["name"].startswith("drop τ=") for event in events)
    assert dropped == np.count_nonzero(run.pushes["verdict"] == Verdict.DROP)


def test_a_window_of_a_trace_holds_what_it_touches(tmp_path: Path) -> None:
    run = make(tmp_path, logs_by_hand.softsync(), 2)
    whole = trace(tmp_path, run)
    part = trace(tmp_path, run, from_s=3.5, to_s=5.5)
    check_format(part)

    def touching(event: dict[str, Any]) -> bool:
        return bool(event["ts"] <= 5.5e6 and event["ts"] + event.get("dur", 0) >= 3.5e6)

    spans = [event for event in whole if event["ph"] in "Xi" and touching(event)]
    mine = [event for event in part if event["ph"] in "Xi"]
    assert [event for event in mine if touching(event)] == spans
    assert all(event["name"] != "update" or event["args"]["clock"] == 2 for event in mine)


def test_many_events_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, fabricate.simulated("softsync", learners=5, wanted=2, updates=20), 5)
    whole = trace(tmp_path, run)
    monkeypatch.setattr(chrome_trace, "_BLOCK", 7)
    assert trace(tmp_path, run) == whole


# -------------------------------------------------------------------------------------------------------------- figure


def test_the_figure_of_a_small_run(tmp_path: Path) -> None:
    log = evaluated(logs_by_hand.softsync(2))
    log.pushes["verdict"][4], log.pushes["reason"][4] = Verdict.DROP, Reason.STALE
    log.events = rows("events", [row("events", kind=Event.DEPARTED, learner_id=1, time_s=9.0)])
    run = make(tmp_path, log, 2, shards=2, evaluator=True, environment={"evaluator_rank": 4})
    drawing = figures_timeline.drawing(run)
    assert drawing.key == "timeline"
    assert drawing.figure is not None
    (axes,) = drawing.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["shard 0", "shard 1", "evaluator", "learner 0", "learner 1"]
    assert axes.get_ylim() == (5, 0)  # shards on top
    assert axes.get_xlabel() == "time since the start barrier [s]"
    bars = {str(found.get_label()): found.get_paths() for found in axes.collections}
    assert set(bars) == {"wait", "pull", "compute", "injected delay", "push", "update", "evaluate"}
    corners = bars["compute"][0].vertices
    found = look(run)
    assert corners[:, 0].min() == pytest.approx(found.cycles.edges[0, COMPUTE] / 1e9)
    assert corners[:, 0].max() == pytest.approx(found.cycles.edges[0, COMPUTE + 1] / 1e9)
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((3.1, 3.9))
    assert len(bars["update"]) == 8
    labels = [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]
    assert labels[-5:] == ["push arrives, applied", "dropped", "late", "departed", "staleness τ; × = dropped"]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "1×", "0", "0", "0", "0", "3", "1"]
    (departed,) = [line for line in axes.lines if line.get_label() == "departed"]
    assert (np.asarray(departed.get_xdata()).tolist(), np.asarray(departed.get_ydata()).tolist()) == ([9.0], [4.5])


def test_nothing_of_the_figure_is_cut(tmp_path: Path) -> None:
    run = make(tmp_path, fabricate.simulated("backup", learners=20, wanted=18, updates=10), 20)
    figure = figures_timeline.drawing(run).figure
    assert figure is not None
    figure.draw_without_rendering()
    (axes,), whole = figure.axes, figure.bbox
    assert figure.get_size_inches()[0] == WIDTH_IN
    for box in [axes.get_tightbbox(), *(legend.get_window_extent() for legend in figure.legends)]:
        assert box is not None
        assert box.x0 >= whole.x0 - 1
        assert box.y0 >= whole.y0 - 1
        assert box.x1 <= whole.x1 + 1
        assert box.y1 <= whole.y1 + 1


def test_colours_are_those_of_the_learners_time() -> None:
    for name, (label, colour) in figures_time._ACTIVITIES.items():
        assert figures_timeline._BARS[name.removesuffix("_s")][:2] == (label, colour)


def test_no_figure_of_what_could_not_be_read(tmp_path: Path) -> None:
    many = make(tmp_path / "many", fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    drawing = figures_timeline.drawing(many)
    assert drawing.figure is None
    assert drawing.missing == f"61 ranks, of which 40 can be told apart; see mpisgd timeline {many.path} --learners 39"
    assert figures_timeline.drawing(many, look(many, learners=39)).figure is not None

    long = make(tmp_path / "long", fabricate.simulated("softsync", learners=2, wanted=1, updates=300), 2)
    drawing = figures_timeline.drawing(long)
    assert drawing.figure is None
    start, hint = drawing.missing.split("; see mpisgd timeline ")
    assert start.endswith(", of which 100 can be told apart")
    assert hint.startswith(f"{long.path} --from-s 0 --to-s ")
    to_s = float(hint.split()[-1])
    assert figures_timeline.drawing(long, look(long, to_s=to_s)).figure is not None
    assert figures_timeline.drawing(long, look(long, to_s=0.0)).missing == "no gradient was pushed in this window"
    assert figures_timeline.drawing(make(tmp_path / "none", Log(), 2)).missing == "no gradient was pushed"


def test_the_report_shows_it_for_small_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make(tmp_path, logs_by_hand.softsync(), 2)
    report.report(small.path)
    assert (small.path / "report" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    large = make(tmp_path / "large", fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    report.report(large.path)
    assert "no figure timeline: 61 ranks, of which 40 can be told apart" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_trace_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, logs_by_hand.softsync(), 2, ended=False)
    assert command.main([str(run.path)]) == 0
    read = json.loads((run.path / "report" / "timeline.json").read_text(encoding="utf-8"))
    assert read["otherData"]["run"].startswith("run\nsoftsync n=1")
    assert (run.path / "report" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert f"{len(read['traceEvents'])} events; open it in https://ui.perfetto.dev or chrome://tracing" in told
    assert "learners' spans are drawn as early as the log allows" in told

    out = tmp_path / "deep" / "er" / "a.json"
    options = ["--out", str(out), "--from-s", "3.5", "--to-s", "5.5", "--learners", "1", "--no-figure"]
    assert command.main([str(run.path), *options]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["a.json"]
    told = capsys.readouterr().out
    assert "shown: learners 0 to 0 of 2" in told
    assert "figure" not in told


def test_the_command_says_why_there_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    assert command.main([str(run.path)]) == 0
    assert "no figure timeline: 61 ranks, of which 40 can be told apart" in capsys.readouterr().out
    assert [path.name for path in (run.path / "report").iterdir()] == ["timeline.json"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--from-s", "3", "--to-s", "2.5"], "--from-s 3 --to-s 2.5: expected a window that does not end before it begins"),
        (["--from-s", "nan", "--to-s", "2"], "--from-s nan --to-s 2: expected a window"),
        (["--to-s", "nan"], "--from-s 0 --to-s nan: expected a window"),
        (["--to-s=-1"], "--from-s 0 --to-s -1: expected a window"),
        (["--from-s", "nan"], "--from-s nan: expected a number below 10, at which the log ends"),
        (["--from-s", "100"], "--from-s 100: expected a number below 10"),
        (["--learners", "0"], "--learners 0: expected at least 1"),
        (["--out", "a.png"], "--out a.png: expected the name of a trace"),
    ],
)
def test_what_the_user_cannot_mean(tmp_path: Path, options: list[str], why: str) -> None:
    run = make(tmp_path, logs_by_hand.softsync(), 2)
    with pytest.raises(ConfigError, match=why):
        command.main([str(run.path), *options])
    assert not (run.path / "report").exists()


def test_no_run_no_pushes_no_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run directory of mpisgd"):
        command.main([str(tmp_path)])
    with pytest.raises(DataError, match="there is no timeline, no gradient was pushed by learners 0 to 1"):
        command.main([str(make(tmp_path / "empty", Log(), 2).path)])
    run = make(tmp_path, logs_by_hand.softsync(), 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        command.main([str(run.path), "--out", str(tmp_path / "file" / "below.json")])
    damaged = run.path / "shard-000.attempt-0.h5"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"shard-000\.attempt-0\.h5"):
        command.main([str(run.path)])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "usage: mpisgd timeline" in capsys.readouterr().out
