"""Jobs whose learners and shards may share memory."""

from __future__ import annotations

from typing import Any

from torch import nn

COMMON: dict[str, Any] = {"protocol": "hardsync", "epochs": 0.3, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.1}}
#: name -> (ranks, what differs from COMMON)
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "S1": (3, {}),
    "S2": (5, {"shards": 2, "optimizer": {"name": "adam"}, "alpha0": 0.003, "averaging": 0.9}),
    "alone": (2, {"nonfinite": "drop", "clip_norm": 0.5}),
    "agreed": (4, {"shards": 2, "clip_average": 0.1}),
    "dealt": (4, {"sampling": "dealt", "evaluator": True}),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
