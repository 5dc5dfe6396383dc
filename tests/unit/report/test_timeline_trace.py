"""A timeline as a Chrome trace: its format, its events, a window of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis.timeline import look
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.report import chrome_trace
from tests.unit import fabricate
from tests.unit.fabricate import PROTOCOLS, evaluated, make, one_learner, row, rows


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


def overlaps(spans: Sequence[tuple[int, int]]) -> list[Any]:
    ordered = sorted(spans)
    return [(one, other) for one, other in itertools.pairwise(ordered) if one[1] > other[0] or one[0] > one[1]]


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
    log = one_learner()
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
    log = evaluated(fabricate.softsync(2))
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
    run = make(tmp_path, fabricate.softsync(), 2)
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
