"""`sampling = "dealt"`: each portion of each epoch is applied exactly once, whoever dies, hangs, is slow, or is gone on without."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config import compatibility, config_file, replace
from mpisgd.job.resume import check_changes
from mpisgd.protocols import PROTOCOLS
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.simulate import job
from tests.effort import examples, spread
from tests.virtual.jobs import SIZES, TENSORS, config, simulated
from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import draw_dealt
from tests.virtual.test_laws import COMMON, JitteryWire, Laws, jitters, jobs

NAMES = sorted(name for name in PROTOCOLS if name != "allreduce")
OWN = {"downpour": {"n_fetch": 2}, "ssp": {"get_model_frequency": 1}}


def applied(run: Run, shard: int = 0) -> np.ndarray:
    """How often each portion was applied on a shard."""
    rows = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.APPLY)]
    rows = rows[rows["clock"] < run.summaries["final_clock"][shard]]
    samples = run.config["mu"] * run.config["protocol"].get("n_push", 1)
    total = math.ceil(math.ceil(run.config["epochs"] * run.environment["train_samples"]) / samples)
    return np.bincount(rows["portion"], minlength=total)


def counts_once(run: Run) -> None:
    """Exactly once where it is dealt, unless all have left; at most once on the other shards."""
    left = run.events[(run.events["kind"] == Event.DEPARTED) & (run.events["shard"] == 0)]
    deserted = len(left) == run.lambda_
    assert (applied(run) == 1).all() or (deserted and applied(run).max(initial=0) <= 1)
    for shard in range(1, run.shards):
        assert applied(run, shard).max(initial=0) <= 1
    laws = Laws(run)
    laws.exact = True  # a mini-batch may come again: it was rejected
    for shard, books in enumerate(run.books()):
        assert books.balanced
        laws.staleness_is_clock_minus_timestamp(shard)
        laws.the_divisor_is_counted(shard)
        assert set(laws.pushes[shard]["reason"].tolist()) <= {Reason.NONE, Reason.STALE, Reason.FINISHED, Reason.DUPLICATE}


def drawn(changes: Mapping[str, Any]) -> dict[str, Any]:
    name = changes["protocol"]["name"]
    protocol = {**changes["protocol"], **OWN.get(name, {})}
    return {**changes, "sampling": "dealt", "ahead": 0, "way": changes["way"].replace("streamed", "whole"), "protocol": protocol}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", spread(NAMES, 4))
def test_in_any_virtual_job_each_portion_counts_once(protocol: str) -> None:
    """Stragglers, pauses, departures, networks and shards of all kinds; replay finds each log possible, and simulates it again."""

    @settings(COMMON, max_examples=examples(40))
    @given(jobs(protocol, 6), jitters)
    def one(changes: dict[str, Any], jitter_s: float) -> None:
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
            patched.setattr(job, "VirtualWire", JitteryWire)
            patched.setattr(JitteryWire, "mean_ns", 1e9 * jitter_s)
            out = Path(directory) / "run"
            counts_once(simulated(out, SIZES, **drawn(changes)))
            assert replay.check(out) == ""

    one()


def test_without_faults_hardsync_is_that_of_epochs(tmp_path: Path) -> None:
    """Who is dealt what does not depend on who asks first: 240 samples are 15 rounds of 4 learners."""
    changes: dict[str, Any] = {"protocol": {"name": "hardsync"}, "shards": 2}
    runs = [simulated(tmp_path / kind, TENSORS, sampling=kind, **changes) for kind in ("epoch", "dealt")]
    again = simulated(tmp_path / "again", TENSORS, sampling="dealt", compute={"sigma": 2.0}, **changes)
    weights = [torch.load(run.path / "weights.pt")["theta"] for run in (*runs, again)]
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
    assert runs[1].pushes["portion"].tolist() != again.pushes["arrival_s"].tolist()


def test_the_last_round_has_copies(tmp_path: Path) -> None:
    """Of 98 portions of 4 learners: two are dealt twice in round 25, and count once."""
    run = simulated(tmp_path / "run", SIZES, protocol={"name": "hardsync"}, sampling="dealt", epochs=0.98)
    last = run.pushes[run.pushes["clock"] == 24]
    assert last[["learner_id", "portion", "reason"]].tolist() == [(0, 96, 0), (1, 97, 0), (2, 96, 7), (3, 97, 7)]
    assert run.updates["gradients"].tolist() == [4] * 24 + [2]
    assert run.updates["samples"][-1] == 392
    counts_once(run)


def test_a_slow_learner_holds_up_no_portion(tmp_path: Path) -> None:
    """One of 4 is 50 times slower: what it is dealt is done by others after LEASE portions for each learner, and counts once."""
    run = simulated(tmp_path / "run", SIZES, sampling="dealt", protocol={"name": "async"}, straggler={"slowdown": {"0": 50.0}})
    counts_once(run)
    mine = run.pushes[run.pushes["learner_id"] == 0]
    assert (mine["reason"] == Reason.DUPLICATE).any()
    order = run.pushes["portion"][run.pushes["verdict"] == Verdict.APPLY]
    assert (order - np.maximum.accumulate(order)).min() > -25, "none is done much later than its neighbours"
    own = simulated(tmp_path / "epoch", SIZES, protocol={"name": "async"}, straggler={"slowdown": {"0": 50.0}})
    counts = np.bincount(own.pushes["learner_id"], minlength=4)
    assert counts[0] < counts[1:].min() / 10, "without it a quarter of the data is hardly seen"


def test_a_rejected_gradient_is_of_the_same_portion(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, sampling="dealt", protocol={"name": "versioned"}, shards=2)
    for learner_id in range(4):
        rows = run.pushes[(run.pushes["learner_id"] == learner_id) & (run.pushes["shard"] == 0)]
        again = np.flatnonzero(np.diff(rows["seq"]) == 0)
        assert len(again)
        assert (rows["portion"][again] == rows["portion"][again + 1]).all()
    counts_once(run)


def test_a_log_names_portions_only_where_they_are_dealt(tmp_path: Path) -> None:
    dealt, epoch = (simulated(tmp_path / sampling, SIZES, sampling=sampling, epochs=0.1) for sampling in ("dealt", "epoch"))
    assert "portion" in (dealt.pushes.dtype.names or ())
    assert "portion" not in (epoch.pushes.dtype.names or ())


def test_who_leaves_gives_back_what_it_had(tmp_path: Path) -> None:
    failures = {"then": "leave", "at_s": {"1": 0.35, "2": 1.1}}
    run = simulated(tmp_path / "run", SIZES, sampling="dealt", protocol={"name": "softsync"}, failures=failures)
    assert (run.events["kind"] == Event.DEPARTED).sum() == 2
    counts_once(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_whatever_befalls_real_loops_each_counts_once(number: int, tmp_path: Path) -> None:
    """Learners are killed, stopped and cut off, jobs end and go on from checkpoints, also with other shards and learners: every
    portion of every run that is DONE was applied once, and replay comes to its weights."""
    torn = 0
    torch.set_num_threads(1)
    for at in range(number * examples(10), (number + 1) * examples(10)):
        one = draw_dealt(random.Random(f"dealt:{at}"), at)
        seen = aftermath.weather(one, tmp_path / str(at))
        assert not seen.failures, f"{one}:\n{seen.failures[0]}\n{one!r}"
        torn += seen.totals["DONE"]
    assert torn


REFUSED = {
    "collective": {"protocol": {"name": "allreduce"}},
    "node": {"aggregation": "node", "protocol": {"name": "hardsync"}},
    "per layer": {"per_layer": True},
    "ahead": {"ahead": 1},
    "several pushes": {"protocol": {"name": "downpour", "n_fetch": 2}},
    "stages": {"group_size": 2},
    "drops": {"nonfinite": "drop"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name: str, tmp_path: Path) -> None:
    changes = {"protocol": {"name": "softsync"}, **REFUSED[name]}
    with pytest.raises(ConfigError, match=f"sampling.*{compatibility.REFUSED['dealt', name][:30]}"):
        simulated(tmp_path / "run", TENSORS, sampling="dealt", **changes)
    assert config(tmp_path / "run", TENSORS, **changes).sampling == "epoch"


def test_a_run_goes_on_to_no_fewer_portions(tmp_path: Path) -> None:
    """More of them may have been applied than there would be."""
    run = simulated(tmp_path / "run", SIZES, sampling="dealt", epochs=0.5)
    config = config_file.of_run(run.path)
    check_changes(run.path, replace(config, epochs=0.6))
    with pytest.raises(ConfigError, match=r"epochs = 0.4: expected no fewer beside sampling = 'dealt'"):
        check_changes(run.path, replace(config, epochs=0.4))
