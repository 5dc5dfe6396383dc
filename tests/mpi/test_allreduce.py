"""allreduce on real ranks, with every way to send and wait: the bits of hardsync, whatever the options; its log proves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.update.optimizer import CACHED_NBYTES

from .conftest import Shared, dealt, only

BFLOAT16 = {"push_format": "bfloat16", "pull_format": "bfloat16"}
LAYERWISE = {"way": "buckets"}
UNEVEN = {"delay": "exponential", "delay_mean_s": 0.003, "slowdown": {"0": 2.0}}
#: name -> (learners, shards of its twin, what differs from COMMON). Only SGD of small slices has the same bits however the
#: vector is cut: the others' kernels treat the last elements of a slice by themselves.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "4": (4, 2, {"straggler": UNEVEN, "averaging": 0.9, "evaluation": {"every_epochs": 0.2}}),
    "4-evaluator": (4, 3, {"evaluator": True, "evaluation": {"every_epochs": 0.2, "train": True}}),
    "3": (3, 3, {"optimizer": "adam", "clip_norm": 0.5, "schedule": "linear", "linear_scaling": True, "alpha0": 0.002}),
    "cnn": (
        4,
        1,
        {"model": "small_cnn", "sampling": "replacement", "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
    ),
    "diverged": (2, 2, {"alpha0": 1e30, "nonfinite": "continue"}),
    "large": (2, 2, {"model": {"name": "mlp", "hidden": [1500, 1500]}, "epochs": 0.03}),
    "large-bfloat16": (2, 2, {"model": {"name": "mlp", "hidden": [1500, 1500]}, "epochs": 0.03, **BFLOAT16}),
    "large-layerwise": (2, 2, {"model": {"name": "mlp", "hidden": [1500, 1500, 1500]}, "epochs": 0.03, **LAYERWISE}),
    "large-layerwise-bfloat16": (
        *(2, 2),
        {"model": {"name": "mlp", "hidden": [1500, 1500, 1500]}, "epochs": 0.03, **LAYERWISE, **BFLOAT16},
    ),
    "3-layerwise": (3, 3, {"model": "small_cnn", "evaluator": True, **BFLOAT16, **LAYERWISE}),
    "4-layerwise": (4, 4, {"straggler": UNEVEN, "averaging": 0.9, "evaluation": {"every_epochs": 0.2}, **LAYERWISE}),
    "4-few": (4, 4, {"push_format": "topk", "topk_share": 0.1, "pull_format": "bfloat16"}),
}
NODE = "-node"
"""The same in memory that all share, the program's choice."""
for _each in ("4", "cnn", "large"):
    RUNS[_each + NODE] = RUNS[_each]
    RUNS[_each] = (*RUNS[_each][:2], {**RUNS[_each][2], "way": "whole"})
COMMON = {"epochs": 0.3, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}


CASES = dealt(RUNS, always=("4-node", "3", "large-bfloat16", "large-layerwise", "3-layerwise"))
TWIN = "twin-"
"""The same by hardsync, those of an evaluator evaluated by learner 0; made once."""


def job(directory: Path, name: str) -> dict:
    learners, shards, special = RUNS[name.removeprefix(TWIN)]
    config = {**COMMON, **special, "out": str(directory / name)}
    if name.startswith(TWIN):
        config["way"] = "whole"
        return {"ranks": learners + shards, "config": {**config, "protocol": "hardsync", "shards": shards, "evaluator": False}}
    return {"ranks": learners + special.get("evaluator", False), "config": {**config, "protocol": "allreduce"}}


TWINS = {name.removesuffix(NODE): ("ssend", TWIN + name.removesuffix(NODE)) for _, name in CASES}
SHARED = Shared([*CASES, *TWINS.values()], job)


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_the_bits_of_hardsync(runs: Path, switch: str, name: str) -> None:
    run, twin = runs / switch / name, runs / "ssend" / (TWIN + name.removesuffix(NODE))
    ours, theirs = (torch.load(each / schema.WEIGHTS, weights_only=True) for each in (run, twin))
    assert list(ours) == list(theirs) == ["theta"] + ["thetabar"] * ("averaging" in RUNS[name][2])
    for vector, state in ours.items():
        for key, value in state.items():
            assert value.numpy().tobytes() == theirs[vector][key].numpy().tobytes()
    one, other = Run(run), Run(twin)
    columns = ["clock", "gradients", "samples", "learning_rate", "mean_loss"]
    for column in columns:
        of_shard_0 = (run.updates[column][run.updates["shard"] == 0] for run in (one, other))
        assert np.array_equal(*of_shard_0, equal_nan=True), column
    assert one.evaluations[["clock_min", "averaged", "train", "error"]].tolist() == (
        other.evaluations[["clock_min", "averaged", "train", "error"]].tolist()
    )


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_the_log_proves_them(runs: Path, switch: str, name: str) -> None:
    assert replay.check(runs / switch / name, trust=True) == ""


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_every_rank_is_learner_and_shard_and_its_books_balance(runs: Path, switch: str, name: str) -> None:
    run, learners = Run(runs / switch / name), RUNS[name][0]
    assert run.shards == run.lambda_ == learners
    assert run.environment["shard_ranks"] == list(range(learners))
    assert run.environment["world_size"] == learners + RUNS[name][2].get("evaluator", False)
    updates = int(run.summaries["final_clock"][0])
    for books in run.books():
        assert books.balanced
        assert (books.pushed, books.applied) == (learners * updates, learners * updates)
    for shard in range(learners):
        rows = run.pushes[run.pushes["shard"] == shard]
        assert rows["learner_id"].tolist() == [*range(learners)] * updates, "summed in the order of learners (law 5)"
        assert not rows["staleness"].any()


def test_slices_were_large_and_small(runs: Path) -> None:
    """Else this shows less than it says."""
    large, small = (Run(runs / "ssend" / name).environment["parameter_nbytes"] / RUNS[name][0] for name in ("large-bfloat16", "3"))
    assert large > CACHED_NBYTES > small


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "diverged"))
def test_one_run_diverged(runs: Path, switch: str, name: str) -> None:
    assert Run(runs / switch / name).summaries["diverged"].any()
