"""Layers exchanged one by one on real ranks, two and three shards, with every way to send and wait [Chen16 2, A.3]."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from . import laws
from .conftest import Shared, dealt, jobs_of, only


class Attending(nn.Module):
    """Rows of a digit as tokens: weights that are used without a call, batch norm, dropout, and one layer that is entered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.again = nn.Linear(8, 8)
        self.out = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = self.encoder(self.norm(inputs).flatten(0, 1))
        output: torch.Tensor = self.out(self.again(torch.relu(self.again(rows))).flatten(1))
        return output


def attending() -> nn.Module:
    return Attending()


_OWN = random.Random(os.getpid())


class Pause(nn.Module):
    """Between two slices, now and then, of each rank by itself, so that the others make updates there. Pauses of all in each
    mini-batch bring learners into step: all push, then all pull."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if _OWN.random() < 0.3:
            time.sleep(0.02)
        return inputs


def pausing() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Pause(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass, in which new weights of the layers above may come."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradients[0]


class Twice(nn.Module):
    """The weights of `shared` are read, below the layer `between`, when their own gradient has long been there."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.shared, self.between, self.top = (nn.Linear(24, 24) for _ in range(4))  # a slice each

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        below = torch.relu(self.below(inputs.flatten(1)[:, 20:44])) @ self.shared.weight.detach()
        between: torch.Tensor = Slow.apply(self.between(Slow.apply(below)))  # type: ignore[no-untyped-call]
        output: torch.Tensor = self.top(torch.relu(self.shared(torch.relu(between))))
        return output[:, :10]


def twice() -> nn.Module:
    return Twice()


LATE = {"delay": "exponential", "delay_mean_s": 0.003, "slowdown": {"0": 2.0}}
ALWAYS_LATE = {"delay": "constant", "delay_mean_s": 0.01, "slowdown": {"0": 2.0}}
"""However the ranks come to a core."""
HOW: dict[str, dict[str, Any]] = {"layerwise": {}, "whole": {"per_layer": False, "way": "whole"}}
BOTH = tuple(HOW)
STAGES = {"clip_norm": 0.5, "nonfinite": "drop", "push_format": "bfloat16"}
SEVERAL = {"accumulation": 2, "autocast": "float16", "alpha0": 0.01}
"""Backward passes for one gradient: of mini-batches, and again where one overflows."""
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "pausing-async-S2": (5, {"protocol": "async", "shards": 2, "model": {"name": f"{__name__}:pausing"}}),
    "pausing-ssp-S2": (6, {"protocol": {"name": "ssp", "slack": 1}, "shards": 2, "model": {"name": f"{__name__}:pausing"}}),
    "async-S3": (6, {"protocol": {"name": "async", "modulation": "inverse"}, "shards": 3, "straggler": LATE, "averaging": 0.9}),
    "few-S3": (6, {"protocol": "async", "shards": 3, "model": {"name": "mlp", "hidden": [32]}}),
    "softsync-S2": (6, {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "evaluator": True}),
    "attending-S4": (6, {"protocol": "async", "shards": 4, "model": {"name": f"{__name__}:attending"}, "alpha0": 0.01}),
    **{f"hardsync-S2-{how}": (5, {"protocol": "hardsync", "shards": 2, **HOW[how]}) for how in BOTH},
    **{f"hardsync-S2-stages-{how}": (5, {**STAGES, "protocol": "hardsync", "shards": 2, **HOW[how]}) for how in BOTH},
    **{f"hardsync-S2-several-{how}": (5, {**SEVERAL, "protocol": "hardsync", "shards": 2, **HOW[how]}) for how in BOTH},
    **{
        f"hardsync-S4-twice-{how}": (
            6,
            {"protocol": "hardsync", "shards": 4, **HOW[how], "model": {"name": f"{__name__}:twice"}, "alpha0": 0.1},
        )
        for how in BOTH
    },
    "attending-S3-several": (5, {**SEVERAL, "protocol": "async", "shards": 3, "model": {"name": f"{__name__}:attending"}}),
    "bfloat16-S2": (5, {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "push_format": "bfloat16"}),
    "versioned-S2": (5, {"protocol": "versioned", "shards": 2, "straggler": LATE}),
    "backup-S2": (5, {"protocol": {"name": "backup", "b": 1}, "shards": 2, "straggler": ALWAYS_LATE, "epochs": 1.0}),
}
COMMON = {
    "per_layer": True,
    "model": {"name": "mlp", "hidden": [32, 32, 32]},
    "epochs": 0.3,
    "mu": 8,
    "threads": 1,
    "log": {"progress": "off"},
    "evaluation": {"every_epochs": 0},
}
CASES = dealt(
    RUNS,
    once=[name for name in RUNS if name.endswith("-whole")],
    always=("attending-S4", "few-S3", "hardsync-S4-twice-layerwise", "hardsync-S4-twice-whole"),
)
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run, again=name.startswith("versioned"))
    assert run.summaries["samples"].min() >= 431
    assert replay.check(run.path, trust=True) == ""
    own = [np.bincount(run.pushes["learner_id"][run.pushes["shard"] == shard]).tolist() for shard in range(run.shards)]
    assert all(each == own[0] for each in own), "each mini-batch comes to all shards"


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), [(switch, name) for switch, name in only(CASES, "hardsync") if "layerwise" in name])
def test_hardsync_arrives_at_the_weights_of_whole_vectors(runs: Path, switch: str, name: str) -> None:
    paths = runs / switch / name, runs / "ssend" / name.replace(*BOTH)
    first, other = (torch.load(path / schema.WEIGHTS, weights_only=True)["theta"] for path in paths)
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.deeper
def test_slices_are_of_different_clocks_where_nobody_promises_one(runs: Path) -> None:
    for switch, name in CASES:
        run = Run(runs / switch / name)
        stamps = {}
        for row in run.pushes:
            stamps.setdefault((row["learner_id"], row["seq"]), set()).add(row["timestamp"])
        mixed = sum(len(clocks) > 1 for clocks in stamps.values())
        if name.startswith(("hardsync", "backup")):
            assert mixed == 0, name
        if name.startswith("pausing"):
            assert mixed > 0, name


def test_the_slices_are_layers(runs: Path) -> None:
    twice = Run(runs / "ssend" / "hardsync-S4-twice-layerwise").environment["layers"]
    assert twice == [["below"], ["shared"], ["between"], ["top"]]
    assert Run(runs / "ssend" / "few-S3").environment["layers"][0] == ["1 1/3"], "there are but two"
    names = [name for names in Run(runs / "ssend" / "attending-S4").environment["layers"] for name in names]
    assert names[:3] == ["norm", "encoder.self_attn", "encoder.self_attn.out_proj"]
    assert "layers" not in Run(runs / "ssend" / "hardsync-S4-twice-whole").environment


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "backup"))
def test_late_gradients_of_backup_are_dropped_slice_by_slice(runs: Path, switch: str, name: str) -> None:
    rows = Run(runs / switch / name).pushes
    assert (rows["verdict"] == Verdict.DROP).any(), "else this shows nothing"
    assert not rows["staleness"][rows["verdict"] == Verdict.APPLY].any()
