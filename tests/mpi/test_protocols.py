"""hardsync, softsync and backup on 2 to 8 real ranks, one to three shards, with every way to send and wait: the laws."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import TABLES, Verdict

from . import laws
from .conftest import Shared, dealt, jobs_of, only

#: name -> (ranks, what differs from COMMON)
RUNS = {
    f"{protocol['name']}-{ranks}-S{shards}": (ranks, {"protocol": protocol, "shards": shards})
    for protocol in ({"name": "hardsync"}, {"name": "softsync", "n": 2}, {"name": "backup", "b": 1})
    for ranks, shards in ((4, 1), (5, 2), (8, 3))
}
RUNS["allreduce-2"] = (2, {"protocol": "allreduce"})
RUNS["allreduce-8"] = (8, {"protocol": "allreduce", "straggler": {"delay": "exponential", "delay_mean_s": 0.002}})
RUNS["allreduce-5-evaluator"] = (5, {"protocol": "allreduce", "evaluator": True, "averaging": 0.9})
RUNS["hardsync-2"] = (2, {"protocol": "hardsync"})
RUNS["softsync-8-evaluator"] = (8, {"protocol": {"name": "softsync", "n": 5}, "shards": 2, "evaluator": True, "averaging": 0.9})
RUNS["hardsync-6-evaluator"] = (6, {"protocol": "hardsync", "evaluator": True, "evaluation": {"every_epochs": 0.5, "train": True}})
RUNS["backup-7-spread"] = (7, {"protocol": {"name": "backup", "N": 3}, "shards": 2, "placement": "spread"})
RUNS["softsync-5-batchnorm"] = (5, {"protocol": {"name": "softsync", "n": 4}, "model": {"name": "mlp", "batch_norm": True}})
RUNS["replacement-clip"] = (
    5,
    {"protocol": {"name": "softsync", "n": 2}, "sampling": "replacement", "clip_norm": 1.0, "schedule": "linear"},
)

COMMON = {"epochs": 1, "mu": 8, "log": {"progress": "off"}, "evaluation": {"every_epochs": 0.5}}
CASES = dealt(RUNS)
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run)
    assert all(run.summaries["samples"] >= 1437)
    assert run.evaluations[-1]["error"] < 0.5, "it learns"


@pytest.mark.parametrize(("switch", "name"), only(CASES, "hardsync", "allreduce", "backup"))
def test_synchronous_ones_apply_only_fresh_gradients_of_one_clock(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    pushes = run.pushes
    assert (pushes["staleness"][pushes["verdict"] == Verdict.APPLY] == 0).all()
    if name.startswith(("hardsync", "allreduce")):
        assert not (pushes["verdict"] == Verdict.DROP).any()
    one_clock: dict[tuple[int, int], set[int]] = {}
    for row in pushes:
        one_clock.setdefault((int(row["learner_id"]), int(row["seq"])), set()).add(int(row["timestamp"]))
    assert all(len(timestamps) == 1 for timestamps in one_clock.values())
    assert len(set(run.summaries["final_clock"])) == 1


@pytest.mark.parametrize(("switch", "name"), only(CASES, "softsync"))
def test_softsync_weighs_each_gradient_by_its_own_staleness(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    applied = run.pushes[run.pushes["verdict"] == Verdict.APPLY]
    assert np.array_equal(applied["weight"], 1.0 / np.maximum(applied["staleness"], 1))
    c = run.lambda_ // run.config["protocol"]["n"]
    assert (run.updates["gradients"] == c).all()
    assert run.environment["gradients_per_update"] == c


@pytest.mark.parametrize(("name", "switch"), {name: switch for switch, name in CASES}.items())
def test_the_log_proves_the_weights(runs: Path, switch: str, name: str) -> None:
    assert replay.check(runs / switch / name, trust=True) == ""


def test_evaluations_and_weights(runs: Path) -> None:
    run = Run(runs / "ssend" / "softsync-8-evaluator")
    rows = run.evaluations
    assert set(rows["averaged"]) == {0, 1}
    assert np.array_equal(rows["snapshot"][rows["averaged"] == 0], [0, 1, 2])
    assert rows["error"][0] > 0.7
    assert rows["error"][-1] < 0.3
    saved = torch.load(runs / "ssend" / "softsync-8-evaluator" / "weights.pt", weights_only=True)
    assert set(saved) == {"theta", "thetabar"}
    rows = Run(runs / "ssend" / "hardsync-6-evaluator").evaluations
    assert set(rows["train"]) == {0, 1}


def test_log_is_one_table_over_all_shards(runs: Path) -> None:
    run = Run(runs / "ssend" / "hardsync-8-S3")
    with h5py.File(run.path / "log.h5") as log:
        for name in TABLES:
            assert log[name][:].tobytes() == run.table(name).tobytes()
        assert set(log["pushes"]["shard"]) == {0, 1, 2}
