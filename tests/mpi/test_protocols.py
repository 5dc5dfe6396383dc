"""hardsync, softsync and backup on 2 to 8 real ranks, one to three shards, plain and synchronous sends: the laws of DESIGN 4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.records.reader import Run
from mpisgd.records.schema import TABLES, Verdict

from . import laws
from .conftest import Shared, jobs_of

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
RUNS["hardsync-6-evaluator"] = (6, {"protocol": "hardsync", "evaluator": True, "evaluation": {"train": True}})
RUNS["backup-7-spread"] = (7, {"protocol": {"name": "backup", "N": 3}, "shards": 2, "placement": "spread"})
RUNS["softsync-5-batchnorm"] = (5, {"protocol": {"name": "softsync", "n": 4}, "model": {"name": "mlp", "batch_norm": True}})
RUNS["replacement-clip"] = (
    5,
    {"protocol": {"name": "softsync", "n": 2}, "sampling": "replacement", "clip_norm": 1.0, "schedule": "linear"},
)

COMMON = {"epochs": 2, "mu": 8, "log": {"progress": "off"}}


SHARED = Shared(("send", "ssend", "blocking"), jobs_of(RUNS, COMMON))


@pytest.fixture(scope="module", params=SHARED.switches)
def runs(request: pytest.FixtureRequest, launched: Callable[[str, str], Path]) -> Path:
    return launched(request.param, __name__)


@pytest.mark.parametrize("name", RUNS)
def test_laws(runs: Path, name: str) -> None:
    run = Run(runs / name)
    laws.hold(run)
    assert all(run.summaries["samples"] >= 2 * 1437)
    assert run.evaluations[-1]["error"] < 0.5, "it learns"


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("hardsync", "allreduce", "backup"))])
def test_synchronous_ones_apply_only_fresh_gradients_of_one_clock(runs: Path, name: str) -> None:
    run = Run(runs / name)
    pushes = run.pushes
    assert (pushes["staleness"][pushes["verdict"] == Verdict.APPLY] == 0).all()
    if name.startswith(("hardsync", "allreduce")):
        assert not (pushes["verdict"] == Verdict.DROP).any()
    one_clock: dict[tuple[int, int], set[int]] = {}
    for row in pushes:
        one_clock.setdefault((int(row["learner_id"]), int(row["seq"])), set()).add(int(row["timestamp"]))
    assert all(len(timestamps) == 1 for timestamps in one_clock.values())
    assert len(set(run.summaries["final_clock"])) == 1


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
