"""Small virtual jobs for tests, from nested mappings as a TOML file gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisgd import models
from mpisgd.config import Config, MlpOptions
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.travel import configured

#: No gradients: 100 mini-batches of four learners.
SIZES = {
    "virtual": {"learners": 4, "gradients": False, "parameters": 1000, "train_samples": 400},
    "compute": {"name": "lognormal"},
    "mu": 4,
    "epochs": 1,
    "log": {"progress": "off"},
}

#: Real gradients, of a model that is quickly computed.
TENSORS = {
    "virtual": {"learners": 4},
    "compute": {"name": "lognormal"},
    "data": {"name": "synthetic", "shape": [6], "classes": 3, "samples": 120, "test_samples": 30},
    "model": {"name": "mlp", "hidden": [8]},
    "mu": 4,
    "epochs": 2,
    "threads": 1,
    "log": {"progress": "off"},
}

#: How a gradient leaves: as a whole, or layer by layer.
HOW: dict[str, dict[str, Any]] = {"whole": {"way": "whole"}, "layerwise": {"per_layer": True}}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; tables are merged, unless the change names another kind."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        same_kind = isinstance(old, dict) and isinstance(value, dict) and value.get("name") in (None, old.get("name"))
        result[key] = merged(old, value) if same_kind else value  # type: ignore[arg-type]
    return result


def config(out: Path, base: Mapping[str, Any] = SIZES, **changes: Any) -> Config:
    return configured(merged({**base, "out": str(out)}, changes))


def simulated(out: Path, base: Mapping[str, Any] = SIZES, user_objects: UserObjects = NO_OBJECTS, **changes: Any) -> Run:
    """The log of a virtual job that has ended in order."""
    outcome = simulate(config(out, base, **changes), user_objects)
    run = Run(out)
    assert outcome.path == out
    assert run.done is not None
    assert run.done["clock"] == list(outcome.clocks) == run.summaries["final_clock"].tolist()
    return run


def weights(run: Run, kind: str = "theta") -> dict[str, np.ndarray]:
    states = torch.load(run.path / schema.WEIGHTS, weights_only=True)
    return {name: tensor.numpy() for name, tensor in states[kind].items()}


def flat(run: Run, kind: str = "theta") -> np.ndarray:
    return np.concatenate([vector.ravel() for vector in weights(run, kind).values()])


def bits(run: Run) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in weights(run).items()}


def tables(run: Run) -> dict[str, bytes]:
    """Every row of a log, as bytes: NaN equals NaN, and 0 is not -0."""
    return {name: run.table(name).tobytes() for name in ("pushes", "updates", "events", "evaluations")}


def not_finite_leaves_no_trace(out: Path, nonfinite: str, changes: Mapping[str, Any]) -> None:
    """A loss that is NaN for some mini-batches: dropped by all shards, and the remainder of the next ones is finite."""
    calls = [0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()
        bad = torch.is_grad_enabled() and calls[0] % 7 == 0
        return torch.nn.functional.cross_entropy(output, target) * (float("nan") if bad else 1.0)

    run = simulated(out, TENSORS, UserObjects(loss=loss), **changes, nonfinite=nonfinite, shards=2)
    rounded = run.pushes["rounded"]
    assert np.isnan(rounded[np.isnan(run.pushes["loss"])]).all()
    if nonfinite == "drop":
        assert np.isfinite(rounded[np.isfinite(run.pushes["loss"])]).all()
        assert 0 < np.isnan(rounded).sum() < len(rounded) / 4


def recording(seen: list[np.ndarray], seed: int) -> UserObjects:
    """An MLP of 24 hidden units, and a loss that writes down the weights whenever a gradient is about to be computed."""
    modules: list[nn.Module] = []

    def factory(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        modules.append(models.make(MlpOptions(hidden=(24,)), input_shape=input_shape, classes=classes, seed=seed))
        return modules[-1]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(torch.cat([p.detach().reshape(-1) for p in modules[-1].parameters()]).numpy().copy())
        return nn.functional.cross_entropy(output, target)

    return UserObjects(factory, loss)  # type: ignore[arg-type]
