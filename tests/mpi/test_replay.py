"""Runs of real ranks, computed again from their logs to the same bits (DESIGN 4, law 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.update.optimizer import CACHED_NBYTES

from .conftest import Shared, jobs_of


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


UNEVEN = {"delay": "exponential", "delay_mean_s": 0.003, "slowdown": {"0": 3.0}}
LATE = {"delay": "constant", "delay_mean_s": 0.01, "slowdown": {"0": 3.0}}
"""Learner 0 is late, however the ranks come to a core."""
ASYNC = {"name": "softsync", "n": 3}
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "hardsync-S3": (7, {"protocol": "hardsync", "shards": 3, "optimizer": {"name": "adam"}, "alpha0": 0.005}),
    "softsync-1": (5, {"protocol": {"name": "softsync", "n": 1}, "straggler": UNEVEN}),
    "softsync-2-S2": (8, {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "averaging": 0.95}),
    "softsync-lambda-S3": (8, {"protocol": {"name": "softsync", "n": 5}, "shards": 3, "straggler": UNEVEN}),
    "plain-S2": (8, {"protocol": {"name": "softsync", "n": 6, "modulation": "none"}, "shards": 2, "alpha0": 0.01}),
    "backup-S2": (6, {"protocol": {"name": "backup", "b": 1}, "shards": 2, "straggler": LATE, "epochs": 1.0}),
    "clip-replacement": (5, {"protocol": ASYNC, "clip_norm": 0.5, "sampling": "replacement", "schedule": "linear"}),
    "cnn-S2": (6, {"protocol": ASYNC, "shards": 2, "model": "small_cnn", "optimizer": {"name": "sgd", "nesterov": True}}),
    "adagrad-S2": (6, {"protocol": ASYNC, "shards": 2, "optimizer": "adagrad", "linear_scaling": True, "alpha0": 0.005}),
    "diverged": (4, {"protocol": ASYNC, "alpha0": 1e30, "nonfinite": "continue", "averaging": 0.5}),
    "large-S2": (
        5,
        {"protocol": ASYNC, "shards": 2, "model": {"name": "mlp", "hidden": [1500, 1500]}, "epochs": 0.03, "threads": 2},
    ),
}
RUNS["buffers"] = (4, {"protocol": ASYNC, "model": {"name": f"{__name__}:counting"}})
COMMON = {"epochs": 0.4, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}


SHARED = Shared([("send", name) for name in RUNS], jobs_of(RUNS, COMMON))


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits(runs: Path, name: str) -> None:
    proof = replay.replay(runs / name, trust=True)
    assert proof.reason == ""
    assert [each.name for each in proof.differences] == (["theta", "thetabar"] if "averaging" in RUNS[name][1] else ["theta"])
    assert all(each.elements == 0 for each in proof.differences)
    assert proof.other_losses == 0
    assert proof.gradients == np.count_nonzero(Run(runs / name).pushes["shard"] == 0)


def test_the_runs_were_asynchronous_and_lost_gradients(runs: Path) -> None:
    """Slices of different clocks in one gradient, which depend on luck here, are replayed in tests/unit/test_replay.py."""
    assert any((Run(runs / name).pushes["staleness"] > 1).any() for name in RUNS if "softsync" in name)
    assert Counter(Run(runs / "backup-S2").pushes["verdict"])[Verdict.DROP] > 0
    large = Run(runs / "large-S2").environment
    assert large["parameter_nbytes"] / 2 > CACHED_NBYTES, "the fused kernel steps them"
    assert not np.isfinite(Run(runs / "diverged").updates["mean_loss"]).all()
