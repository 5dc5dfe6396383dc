"""Every protocol on 2 to 8 real ranks, one to three shards, plain and synchronous sends: the laws of DESIGN 4."""

from __future__ import annotations

import json
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.records.reader import Run
from mpisgd.records.schema import TABLES, Verdict

from .conftest import drive

#: name -> (ranks, what differs from COMMON)
RUNS = {
    f"{protocol['name']}-{ranks}-S{shards}": (ranks, {"protocol": protocol, "shards": shards})
    for protocol in (
        {"name": "hardsync"},
        {"name": "softsync", "n": 2},
        {"name": "backup", "b": 1},
        {"name": "timeout", "N_min": 2, "timeout_s": 0.002},
        {"name": "versioned", "grads_to_wait": 2},
        {"name": "async", "most_staleness": 6, "modulation": "inverse_plus_one"},
        {"name": "ssp", "slack": 1, "modulation": "inverse"},
    )
    for ranks, shards in ((4, 1), (5, 2), (8, 3))
}
RUNS["late-6-S2"] = (6, {"protocol": {"name": "backup", "b": 2, "late": "apply"}, "shards": 2})
RUNS["tolerant-6-S2"] = (6, {"protocol": {"name": "versioned", "grads_to_wait": 2, "tolerance": 1}, "shards": 2})
RUNS["allreduce-2"] = (2, {"protocol": "allreduce"})
RUNS["allreduce-8"] = (8, {"protocol": "allreduce", "straggler": {"delay": "exponential", "delay_mean_s": 0.002}})
RUNS["allreduce-5-evaluator"] = (5, {"protocol": "allreduce", "evaluator": True, "averaging": 0.9})
RUNS["hardsync-2"] = (2, {"protocol": "hardsync"})
RUNS["softsync-8-evaluator"] = (8, {"protocol": {"name": "softsync", "n": 5}, "shards": 2, "evaluator": True, "averaging": 0.9})
RUNS["hardsync-6-evaluator"] = (6, {"protocol": "hardsync", "evaluator": True, "evaluation": {"train": True}})
RUNS["backup-7-spread"] = (7, {"protocol": {"name": "backup", "N": 3}, "shards": 2, "placement": "spread"})
RUNS["softsync-5-batchnorm"] = (5, {"protocol": {"name": "softsync", "n": 4}, "model": {"name": "mlp", "batch_norm": True}})
RUNS["replacement-clip"] = (
    5,
    {"protocol": {"name": "softsync", "n": 2}, "sampling": "replacement", "clip_norm": 1.0, "schedule": "linear"},
)

UNEVEN = {name for name in RUNS if name.startswith(("timeout", "async"))}
"""Shards may sum different numbers of gradients, and the first that is done ends the run."""
AGAIN = {name for name in RUNS if name.startswith(("versioned", "tolerant"))}
"""A mini-batch may be computed again."""

COMMON = {"epochs": 2, "mu": 8, "log": {"progress": "off"}}


SWITCHES = {
    "send": {"MPISGD_SSEND": "0"},
    "ssend": {"MPISGD_SSEND": "1"},
    "blocking": {"MPISGD_SSEND": "0", "MPISGD_WAIT": "blocking"},
}


@pytest.fixture(scope="module", params=SWITCHES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    jobs = [
        {"ranks": ranks, "config": {**COMMON, **special, "out": str(directory / name)}} for name, (ranks, special) in RUNS.items()
    ]
    drive(directory, jobs, ranks=8, **SWITCHES[request.param])
    return directory


@pytest.mark.parametrize("name", RUNS)
def test_laws(runs: Path, name: str) -> None:
    run = Run(runs / name)
    pushes, done = run.pushes, json.loads((runs / name / "DONE").read_text())
    for books, clock in zip(run.books(), done["clock"], strict=True):
        assert books.balanced
        assert books.applied > 0
        rows = pushes[pushes["shard"] == books.shard]
        applied = rows[(rows["verdict"] == Verdict.APPLY) & (rows["clock"] < clock)]
        updates = run.updates[run.updates["shard"] == books.shard]
        assert np.array_equal(updates["clock"], np.arange(1, clock + 1))
        assert np.array_equal(updates["gradients"], np.bincount(applied["clock"], minlength=clock)), "divisor counted"
        assert updates["samples"][-1] == applied["samples"].sum()
        assert name in UNEVEN or updates["samples"][-1] >= 2 * 1437
    assert run.updates["samples"].max() >= 2 * 1437
    assert (pushes["staleness"] >= 0).all()
    assert np.array_equal(pushes["staleness"], pushes["clock"] - pushes["timestamp"])
    for learner_id in range(run.lambda_):
        for shard in range(run.shards):
            rows = pushes[(pushes["learner_id"] == learner_id) & (pushes["shard"] == shard)]
            assert (rows["timestamp"][1:] >= rows["clock"][:-1]).all(), "a pull never overtakes the push before it"
            seqs = rows["seq"]
            if name in AGAIN:
                assert np.isin(np.diff(seqs), (0, 1)).all()
                seqs = rows["seq"][rows["verdict"] == Verdict.APPLY]
            assert np.array_equal(seqs, np.arange(len(seqs))), "every mini-batch in order, none lost or doubled"
    final = run.evaluations[-1]
    assert final["error"] < 0.5, "it learns"


@pytest.mark.parametrize(
    "name", [name for name in RUNS if name.startswith(("hardsync", "allreduce", "backup", "timeout", "versioned"))]
)
def test_synchronous_ones_apply_only_fresh_gradients_of_one_clock(runs: Path, name: str) -> None:
    run = Run(runs / name)
    pushes = run.pushes
    assert (pushes["staleness"][pushes["verdict"] == Verdict.APPLY] == 0).all()
    if name.startswith(("hardsync", "allreduce")):
        assert not (pushes["verdict"] == Verdict.DROP).any()
    one_clock: dict[tuple[int, int], set[int]] = {}
    for row in pushes:
        one_clock.setdefault((int(row["learner_id"]), int(row["seq"])), set()).add(int(row["timestamp"]))
    assert name in AGAIN or all(len(timestamps) == 1 for timestamps in one_clock.values())
    assert name in UNEVEN or len(set(run.summaries["final_clock"])) == 1


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("softsync")])
def test_softsync_weighs_each_gradient_by_its_own_staleness(runs: Path, name: str) -> None:
    run = Run(runs / name)
    applied = run.pushes[run.pushes["verdict"] == Verdict.APPLY]
    assert np.array_equal(applied["weight"], 1.0 / np.maximum(applied["staleness"], 1))
    c = run.lambda_ // run.config["protocol"]["n"]
    assert (run.updates["gradients"] == c).all()
    assert run.environment["gradients_per_update"] == c


@pytest.mark.parametrize("runs", ["send"], indirect=True)
@pytest.mark.parametrize("name", RUNS)
def test_the_log_proves_the_weights(runs: Path, name: str) -> None:
    assert replay.check(runs / name) == ""


@pytest.mark.parametrize("name", sorted(AGAIN))
def test_by_version_check_every_sample_is_applied_exactly_as_often_as_there_are_epochs(runs: Path, name: str) -> None:
    """2 epochs of 1,437 samples in mini-batches of 8: each learner its share, on every shard, whatever was rejected."""
    run = Run(runs / name)
    mini_batches = math.ceil(2 * 1437 / 8)
    for shard in range(run.shards):
        applied = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.APPLY)]
        for learner_id in range(run.lambda_):
            seqs = applied["seq"][applied["learner_id"] == learner_id]
            assert sorted(seqs) == list(range(math.ceil((mini_batches - learner_id) / run.lambda_)))
    again = run.pushes[run.pushes["verdict"] == Verdict.REJECT]
    assert len(again), "else this shows nothing"


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("ssp")])
def test_nobody_is_further_ahead_than_ssp_allows(runs: Path, name: str) -> None:
    run = Run(runs / name)
    for shard in range(run.shards):
        rows = run.pushes[run.pushes["shard"] == shard]
        pushed = np.zeros(run.lambda_, int)
        for row in rows[rows["verdict"] == Verdict.APPLY]:
            assert pushed[row["learner_id"]] - pushed.min() <= 1, "its weights were given when it was at most 1 ahead"
            pushed[row["learner_id"]] += 1


def test_evaluations_and_weights(runs: Path) -> None:
    run = Run(runs / "softsync-8-evaluator")
    rows = run.evaluations
    assert set(rows["averaged"]) == {0, 1}
    assert np.array_equal(rows["snapshot"][rows["averaged"] == 0], [0, 1, 2])
    assert rows["error"][0] > 0.7
    assert rows["error"][-1] < 0.3
    saved = torch.load(runs / "softsync-8-evaluator" / "weights.pt", weights_only=True)
    assert set(saved) == {"theta", "thetabar"}
    rows = Run(runs / "hardsync-6-evaluator").evaluations
    assert set(rows["train"]) == {0, 1}


def test_log_is_one_table_over_all_shards(runs: Path) -> None:
    run = Run(runs / "hardsync-8-S3")
    with h5py.File(run.path / "log.h5") as log:
        for name in TABLES:
            assert log[name][:].tobytes() == run.table(name).tobytes()
        assert set(log["pushes"]["shard"]) == {0, 1, 2}
