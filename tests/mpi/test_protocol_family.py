"""The other protocols on 4 to 8 real ranks, one to three shards, every way to send and wait: the laws of DESIGN 4, and replay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict

from . import laws
from .conftest import Shared, dealt, jobs_of, only

SIZES = ((4, 1), (5, 2), (8, 3))
SOME_LATE = {"delay": "exponential", "delay_mean_s": 0.003}
"""However the ranks come to a core."""
EACH: dict[str, dict[str, Any]] = {
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.002}},
    "versioned": {"protocol": {"name": "versioned", "grads_to_wait": 2}, "epochs": 1, "straggler": SOME_LATE},
    "async": {"protocol": {"name": "async", "most_staleness": 6, "modulation": "inverse_plus_one"}},
    "ssp": {"protocol": {"name": "ssp", "slack": 1, "modulation": "inverse"}},
    "downpour": {
        "protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4, "local_alpha": 0.02, "warm_up": 5},
        "optimizer": "adagrad",
        "alpha0": 0.02,
        "schedule": {"name": "linear", "warmup_epochs": 0.1},
    },
}
LARGE = {"model": {"name": "mlp", "hidden": [1200, 1200]}, "epochs": 0.2}
"""6 MB: weights are sent in chunks, while they are made."""
STRAGGLERS = {"delay": "exponential", "delay_mean_s": 0.03}
"""The late are late by much longer than it takes to tell them, also where they do not come to a core at once."""
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"{name}-{ranks}-S{shards}": (ranks, {**special, "shards": shards})
        for name, special in EACH.items()
        for ranks, shards in SIZES
    },
    "ssp-5-frequency": (5, {"protocol": {"name": "ssp", "slack": 2, "get_model_frequency": 3}, "schedule": "linear", "shards": 2}),
    "downpour-5-rounded": (
        5,
        {
            "protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4},
            "push_format": "bfloat16",
            "schedule": {"name": "step", "epochs": [0.1, 0.2], "factor": 0.5},
            "shards": 2,
        },
    ),
    "async-6-ramp": (6, {"protocol": {"name": "async", "warm_up": 10, "ramp": 50}, "shards": 2}),
    "async-6-compensated": (6, {"protocol": "async", "shards": 2, "compensation": 0.04}),
    "softsync-5-compensated": (5, {"protocol": {"name": "softsync", "n": 2}, "compensation": 2.0, "compensation_memory": 0.95}),
    "abort-6-S2": (6, {"protocol": {"name": "backup", "b": 2, "abort": True}, "shards": 2, "straggler": STRAGGLERS, "epochs": 1}),
    "late-6-S2": (6, {"protocol": {"name": "backup", "b": 2, "late": "apply"}, "shards": 2}),
    "tolerant-6-S2": (
        6,
        {
            "protocol": {"name": "versioned", "grads_to_wait": 2, "tolerance": 1},
            "shards": 2,
            "epochs": 1,
            "straggler": SOME_LATE,
        },
    ),
    "large-hardsync-4": (4, {"protocol": "hardsync", **LARGE}),
    "large-softsync-5-S2": (
        5,
        {"protocol": {"name": "softsync", "n": 3}, "shards": 2, "optimizer": "rmsprop", "alpha0": 0.001, **LARGE},
    ),
    "large-abort-5": (
        5,
        {
            "protocol": {"name": "backup", "b": 2, "abort": True},
            "straggler": {**STRAGGLERS, "delay_mean_s": 0.06},
            "optimizer": "adagrad",
            "alpha0": 0.01,
            **LARGE,
        },
    ),
    "softsync-5-S2-bfloat16": (5, {"protocol": {"name": "softsync", "n": 3}, "shards": 2, "push_format": "bfloat16"}),
    "teams-6-bfloat16": (6, {"protocol": "hardsync", "aggregation": "node", "team_size": 2, "push_format": "bfloat16"}),
    "large-hardsync-4-bfloat16": (4, {"protocol": "hardsync", "push_format": "bfloat16", **LARGE}),
    "large-async-4": (4, {"protocol": "async", "optimizer": "adam", "alpha0": 0.001, "averaging": 0.9, **LARGE}),
}
UNEVEN = {name for name in RUNS if name.startswith(("timeout", "async"))}
"""Shards may sum different numbers of gradients, and the first that is done ends the run."""
OWN_STEPS = {name for name in RUNS if name.startswith("downpour") or name.endswith("frequency")}
ABORTS = {name for name in RUNS if "abort" in name}
AGAIN = {name for name in RUNS if name.startswith(("versioned", "tolerant"))}

COMMON = {"epochs": 0.5, "mu": 8, "log": {"progress": "off"}, "evaluation": {"every_epochs": 0}}
CASES = dealt(RUNS)
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run, again=name in AGAIN, own_steps=name in OWN_STEPS)
    wanted = run.config["epochs"] * 1437
    assert run.summaries["samples"].max() >= wanted
    assert name in UNEVEN or run.summaries["samples"].min() >= wanted
    assert replay.check(run.path, trust=True) == ""


@pytest.mark.parametrize(("switch", "name"), only(CASES, "timeout", "versioned", *ABORTS))
def test_only_fresh_gradients_of_one_clock_are_applied(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    assert not run.pushes["staleness"][run.pushes["verdict"] == Verdict.APPLY].any()
    number = np.zeros((run.shards, run.lambda_), int)
    one_clock: dict[tuple[int, int], set[int]] = {}
    for shard, learner_id, timestamp in run.pushes[["shard", "learner_id", "timestamp"]].tolist():
        one_clock.setdefault((learner_id, int(number[shard, learner_id])), set()).add(timestamp)
        number[shard, learner_id] += 1
    assert all(len(timestamps) == 1 for timestamps in one_clock.values())
    assert name in UNEVEN or len(set(run.summaries["final_clock"])) == 1


@pytest.mark.parametrize(("switch", "name"), only(CASES, *AGAIN))
def test_by_version_check_every_sample_is_applied_exactly_as_often_as_there_are_epochs(runs: Path, switch: str, name: str) -> None:
    """An epoch of 1,437 samples in mini-batches of 8: each learner its share, on every shard, whatever was rejected."""
    run = Run(runs / switch / name)
    mini_batches = math.ceil(1437 / 8)
    for shard in range(run.shards):
        applied = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.APPLY)]
        for learner_id in range(run.lambda_):
            seqs = applied["seq"][applied["learner_id"] == learner_id]
            assert sorted(seqs) == list(range(math.ceil((mini_batches - learner_id) / run.lambda_)))
    assert (run.pushes["verdict"] == Verdict.REJECT).any(), "else this shows nothing"


@pytest.mark.parametrize(("switch", "name"), only(CASES, "ssp"))
def test_nobody_is_further_ahead_than_ssp_allows(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    protocol = run.config["protocol"]
    ahead = protocol["slack"] + protocol["get_model_frequency"] - 1
    for shard in range(run.shards):
        rows = run.pushes[run.pushes["shard"] == shard]
        pushed = np.zeros(run.lambda_, int)
        for row in rows[rows["verdict"] == Verdict.APPLY]:
            assert pushed[row["learner_id"]] - pushed.min() <= ahead, "its weights were given when it was no more ahead"
            pushed[row["learner_id"]] += 1


@pytest.mark.parametrize(("switch", "name"), only(CASES, *ABORTS))
def test_learners_that_are_told_give_up(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    gave_up = run.events[run.events["kind"] == Event.GAVE_UP]
    assert len(gave_up) > 10
    assert len(set(np.bincount(gave_up["shard"], minlength=run.shards))) == 1, "each shard is told"
    dropped = run.pushes[run.pushes["verdict"] == Verdict.DROP]
    assert len(dropped) < len(gave_up), "few are computed in vain to their end"
