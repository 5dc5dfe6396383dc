"""Every protocol, and every pattern of messages, on 2 to 8 real ranks, one to three shards: the laws of DESIGN 4, and replay.

What a protocol decides is tested without ranks (`tests/unit/protocols/test_protocol_traces.py`, `tests/virtual/test_laws.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.protocols import PROTOCOLS
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import TABLES, Event, Verdict

from . import laws
from .conftest import Shared, dealt, jobs_of, only


class Counting(nn.Module):
    """Its output depends on how often it was called: a buffer that training depends on, each learner's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.layers(inputs) * (1 + 0.01 * self.calls)
        return output


def counting() -> nn.Module:
    return Counting()


SOME_LATE = {"delay": "exponential", "delay_mean_s": 0.003}
"""However the ranks come to a core."""
STRAGGLERS = {"delay": "exponential", "delay_mean_s": 0.03}
"""The late are late by much longer than it takes to tell them, also where they do not come to a core at once."""
LARGE = {"model": {"name": "mlp", "hidden": [1200, 1200]}, "epochs": 0.1}
"""6 MB: weights are sent in chunks, while they are made."""
ABORT = {"name": "backup", "b": 2, "abort": True}
LARGE_ABORT = {**LARGE, "epochs": 0.2, "protocol": ABORT, "straggler": {**STRAGGLERS, "delay_mean_s": 0.06}, "alpha0": 0.01}
LOCAL = {"local_steps": 3, "inner_alpha0": 0.002, "alpha0": 0.7, "epochs": 1}
"""Learners take steps by themselves, and push how far they came."""
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "hardsync-6": (6, {"protocol": "hardsync", "shards": 3, "optimizer": "adam", "alpha0": 0.005}),
    "softsync-6-evaluator": (
        6,
        {
            "protocol": {"name": "softsync", "n": 3},
            "shards": 2,
            "evaluator": True,
            "averaging": 0.9,
            "epochs": 1,
            "evaluation": {"every_epochs": 0.5},
        },
    ),
    "backup-6": (6, {"protocol": {"name": "backup", "N": 3}, "shards": 2, "placement": "spread"}),
    "timeout-5": (5, {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.002}, "shards": 2}),
    "versioned-6": (6, {"protocol": {"name": "versioned", "grads_to_wait": 2}, "shards": 2, "epochs": 1, "straggler": SOME_LATE}),
    "async-4": (4, {"protocol": {"name": "async", "most_staleness": 6, "modulation": "inverse_plus_one"}}),
    "ssp-5": (5, {"protocol": {"name": "ssp", "slack": 1, "modulation": "inverse"}, "shards": 2}),
    "downpour-6": (
        6,
        {
            "protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4, "local_alpha": 0.02, "warm_up": 5},
            "shards": 3,
            "optimizer": "adagrad",
            "alpha0": 0.02,
            "schedule": {"name": "linear", "warmup_epochs": 0.1},
        },
    ),
    "allreduce-5-evaluator": (5, {"protocol": "allreduce", "evaluator": True, "averaging": 0.9}),
    # Learners are told that their gradient comes too late; alone, and while weights are sent in chunks.
    "abort-6": (6, {"protocol": ABORT, "shards": 2, "straggler": STRAGGLERS, "epochs": 0.5}),
    "large-abort-5": (5, LARGE_ABORT),
    "large-softsync-5": (
        5,
        {**LARGE, "protocol": {"name": "softsync", "n": 3}, "shards": 2, "optimizer": "rmsprop", "alpha0": 0.001},
    ),
    "softsync-5-duplex": (5, {**LARGE, "protocol": {"name": "softsync", "n": 3}, "shards": 2, "ahead": 1}),
    "softsync-5-prefetch": (5, {**LARGE, "protocol": {"name": "softsync", "n": 3}, "shards": 2, "ahead": 2}),
    "large-hardsync-5-streamed": (5, {**LARGE, "epochs": 0.3, "protocol": "hardsync", "shards": 2, "way": "streamed"}),
    "large-hardsync-5-agreed": (5, {**LARGE, "protocol": "hardsync", "shards": 2, "clip_average": 0.5}),
    "large-softsync-5-gathered": (5, {**LARGE, "protocol": {"name": "softsync", "n": 3}, "shards": 2, "way": "gathered"}),
    "large-hardsync-4-bfloat16": (4, {**LARGE, "protocol": "hardsync", "push_format": "bfloat16"}),
    "backup-7-gathered": (7, {"protocol": {"name": "backup", "N": 3}, "shards": 2, "way": "gathered", "evaluator": True}),
    "large-abort-5-gathered": (5, {**LARGE_ABORT, "way": "gathered"}),
    "softsync-5-duplex-gathered": (
        5,
        {
            **LARGE,
            "protocol": {"name": "softsync", "n": 3},
            "shards": 2,
            "ahead": 1,
            "way": "gathered",
            "push_format": "bfloat16",
            "pull_format": "bfloat16",
        },
    ),
    "large-hardsync-5-pulls": (5, {**LARGE, "protocol": "hardsync", "shards": 2, "pull_format": "bfloat16"}),
    "large-hardsync-5-streamed-bfloat16": (
        5,
        {
            **LARGE,
            "protocol": "hardsync",
            "shards": 2,
            "way": "streamed",
            "push_format": "bfloat16",
            "pull_format": "bfloat16",
        },
    ),
    "softsync-5-duplex-pulls": (
        5,
        {**LARGE, "protocol": {"name": "softsync", "n": 3}, "shards": 2, "ahead": 1, "pull_format": "bfloat16"},
    ),
    "softsync-5-pulls": (
        5,
        {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "push_format": "bfloat16", "pull_format": "bfloat16"},
    ),
    "softsync-5-topk": (
        5,
        {
            "protocol": {"name": "softsync", "n": 2},
            "shards": 2,
            "push_format": "topk",
            "topk_share": 0.1,
            "pull_format": "bfloat16",
        },
    ),
    "large-hardsync-4-topk": (4, {**LARGE, "protocol": "hardsync", "push_format": "topk", "threads": 2}),
    "abort-6-pulls": (
        6,
        {"protocol": ABORT, "shards": 2, "straggler": STRAGGLERS, "epochs": 1, "pull_format": "bfloat16"},
    ),
    "teams-6-bfloat16": (6, {"protocol": "hardsync", "aggregation": "node", "team_size": 2, "push_format": "bfloat16"}),
    "softsync-5-accumulated": (
        5,
        {"protocol": {"name": "softsync", "n": 2}, "accumulation": 2, "autocast": "bfloat16", "shards": 2},
    ),
    "hardsync-5-local": (5, {**LOCAL, "protocol": "hardsync", "shards": 2}),
    "async-4-local": (4, {**LOCAL, "protocol": "async", "push_format": "bfloat16"}),
    "local-4-versioned": (4, {**LOCAL, "protocol": {"name": "versioned", "tolerance": 1}, "pull_format": "bfloat16"}),
    "hardsync-2": (2, {"protocol": "hardsync"}),
    "hardsync-6-evaluator": (6, {"protocol": "hardsync", "evaluator": True, "evaluation": {"every_epochs": 0.5, "train": True}}),
    "softsync-4-buffers": (
        4,
        {
            "protocol": {"name": "softsync", "n": 3},
            "model": {"name": f"{__name__}:counting"},
            "sampling": "replacement",
            "clip_norm": 1.0,
        },
    ),
}
UNEVEN = {name for name in RUNS if name.startswith(("timeout", "async"))}
"""Shards may sum different numbers of gradients, and the first that is done ends the run."""
FRESH = ("hardsync", "allreduce", "backup", "timeout", "versioned", "abort", "large-abort", "large-hardsync", "teams")
COMMON = {"epochs": 0.3, "mu": 8, "log": {"progress": "off"}, "evaluation": {"every_epochs": 0}}
CASES = dealt(RUNS, always=list(RUNS)[: list(RUNS).index("large-hardsync-4-bfloat16")])
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


def test_every_protocol_is_among_them() -> None:
    assert {protocol if isinstance(protocol := run["protocol"], str) else protocol["name"] for _, run in RUNS.values()} == set(
        PROTOCOLS
    )


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    ahead = 3 if "prefetch" in name else 2 if "duplex" in name else 1
    laws.hold(run, again="versioned" in name, own_steps=name.startswith("downpour"), ahead=ahead)
    wanted = run.config["epochs"] * 1437
    assert run.summaries["samples"].max() >= wanted
    assert name in UNEVEN or run.summaries["samples"].min() >= wanted
    proof = replay.replay(run.path, trust=True)
    assert proof.reason == ""
    assert [each.elements for each in proof.differences] == [0] * (2 if "averaging" in RUNS[name][1] else 1)


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, *FRESH))
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


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "versioned"))
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


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "abort", "large-abort"))
def test_learners_that_are_told_give_up(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    gave_up = run.events[run.events["kind"] == Event.GAVE_UP]
    assert len(gave_up)
    assert len(set(np.bincount(gave_up["shard"], minlength=run.shards))) == 1, "each shard is told"


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "large-hardsync-5-streamed"))
def test_chunks_leave_during_backward_passes(runs: Path, switch: str, name: str) -> None:
    """By the thread that moves transfers, in at least four of the 17 rounds or so; rounded gradients after them."""
    run = Run(runs / switch / name)
    if "bfloat16" in name:
        assert "backward_s" not in run.pushes.dtype.names
        return
    early = run.pushes[run.pushes["backward_s"] > 0]
    assert all(len(set(early["seq"][early["shard"] == shard])) >= 4 for shard in range(run.shards))


def test_evaluations_and_weights(runs: Path) -> None:
    run = Run(runs / "ssend" / "softsync-6-evaluator")
    rows = run.evaluations
    assert set(rows["averaged"]) == {0, 1}
    assert np.array_equal(rows["snapshot"][rows["averaged"] == 0], [0, 1, 2])
    assert rows["error"][0] > 0.7
    assert rows["error"][-1] < 0.3, "it learns"
    saved = torch.load(run.path / "weights.pt", weights_only=True)
    assert set(saved) == {"theta", "thetabar"}


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "hardsync-6-evaluator"))
def test_an_evaluator_also_evaluates_on_the_training_data(runs: Path, switch: str, name: str) -> None:
    assert set(Run(runs / switch / name).evaluations["train"]) == {0, 1}


def test_log_is_one_table_over_all_shards(runs: Path) -> None:
    run = Run(runs / "ssend" / "hardsync-6")
    with h5py.File(run.path / "log.h5") as log:
        for name in TABLES:
            assert log[name][:].tobytes() == run.table(name).tobytes()
        assert set(log["pushes"]["shard"]) == {0, 1, 2}
