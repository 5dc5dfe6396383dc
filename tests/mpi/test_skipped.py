"""On real ranks, by every way of exchange: a head that no mini-batch uses stays, and buffers are handed on; replay has the bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd import replay
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.torch_law.law import vectors
from tests.torch_law.modules import RunningMean
from tests.torch_law.optimizers import Heads

from .conftest import launch

ROOT = str(Path(__file__).parents[2])
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"protocol": "hardsync", "shards": 2},
    "evaluator": {"protocol": "hardsync", "shards": 1, "evaluator": True, "evaluation": {"every_epochs": 0.5}},
    "streamed": {"protocol": "hardsync", "shards": 2, "way": "streamed"},
    "ahead": {"protocol": "hardsync", "shards": 2, "per_layer": True},
    "layerwise": {"protocol": "async", "shards": 2, "per_layer": True},
    "duplex": {"protocol": "softsync", "shards": 2, "ahead": 1},
    "prefetch": {"protocol": "softsync", "shards": 2, "ahead": 2},
    "gathered": {"protocol": "softsync", "shards": 2, "way": "gathered"},
    "topk": {"protocol": "softsync", "shards": 2, "push_format": "topk", "topk_share": 0.2},
    "allreduce": {"protocol": "allreduce", "way": "whole"},
    "buckets": {"protocol": "allreduce", "way": "buckets"},
    "in memory": {"protocol": "allreduce"},
    "teams": {"protocol": "hardsync", "shards": 2, "aggregation": "node"},
}


class Kept(Heads):
    """Heads above a running mean."""

    def __init__(self) -> None:
        super().__init__(rarely=0.3)
        self.mean = RunningMean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mean(x))


SCRIPT = """
import json, os, sys, mpisgd
from unittest import mock
from tests import travel
from tests.mpi.test_skipped import WAYS, Kept
from tests.torch_law.law import vectors
common = json.loads(sys.argv[1])
for name, way in WAYS.items():
    options, variables = travel.launched({**common, **way, "out": name})
    with mock.patch.dict(os.environ, variables):
        mpisgd.train(model=Kept, data=vectors, config=options)
"""
COMMON = {
    "optimizer": {"name": "adamw", "weight_decay": 0.1},
    **{"alpha0": 0.01, "mu": 4, "epochs": 2, "threads": 1, "seed": 1, "log": {"progress": "off"}},
}


@pytest.mark.slow
def test_a_head_that_no_batch_uses_stays_and_replay_agrees(tmp_path: Path) -> None:
    done = launch(4, "-c", SCRIPT, json.dumps(COMMON), timeout_s=200, cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.status == 0, done.text
    never = []
    for name in WAYS:
        state = torch.load(tmp_path / name / schema.WEIGHTS, weights_only=True)["theta"]
        never.append(state["never.weight"])
        learner_0 = Run(tmp_path / name).pushes
        own = learner_0[(learner_0["learner_id"] == 0) & (learner_0["shard"] == 0)]
        assert state["mean.steps"] >= len(own) > 0, "learner 0's, of each of its mini-batches"
        proof = replay.replay(tmp_path / name, UserObjects(model=Kept, data=vectors))
        assert proof.holds, (name, proof.finding)
        assert proof.evaluations == len(Run(tmp_path / name).evaluations)
    assert all(torch.equal(each, never[0]) for each in never), "the factory's, by every way"
    whole, streamed = (torch.load(tmp_path / name / schema.WEIGHTS, weights_only=True)["theta"] for name in ("whole", "streamed"))
    assert all(torch.equal(streamed[name], whole[name]) for name in whole if name != "mean.steps")
    assert (Run(tmp_path / "streamed").pushes["backward_s"] > 0).any(), "chunks left during backward passes"
