"""Real ranks against serial SGD by torch.optim on the whole model, which nobody tuned (optimisers: `unit/update`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import data, models
from mpisgd.base.draws import as_in_the_run
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling
from mpisgd.records.log.reader import Run
from mpisgd.replay import UserObjects, replay
from tests.effort import EVERYTHING, REST
from tests.papers_loops import Lamb, Lars

from .conftest import Shared

MU, SEED, ALPHA0 = 8, 3, 0.02
EPOCHS = 0.4


def groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Weights and biases of two layers, as torch's AdamW has `GROUPED`."""
    weight_1, bias_1, weight_3, bias_3 = parameters
    return [
        {"params": [weight_1], "weight_decay": 0.3},
        {"params": [bias_1], "weight_decay": 0.0},
        {"params": [weight_3], "weight_decay": 0.3, "lr": 0.25 * ALPHA0},
        {"params": [bias_3], "weight_decay": 0.0, "lr": 0.25 * ALPHA0},
    ]


class Clipped(torch.optim.SGD):
    """Clips all gradients before each step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=ALPHA0, momentum=0.9)

    def step(self) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.2)
        super().step()


def lamb(parameters: Iterable[torch.nn.Parameter]) -> Lamb:
    return Lamb(dict(zip("wbWB", parameters, strict=True)), ALPHA0, 0.1, lambda name: False)


def lars(parameters: Iterable[torch.nn.Parameter]) -> Lars:
    return Lars(dict(zip("wbWB", parameters, strict=True)), ALPHA0, 0.1, lambda name: False)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Iterable[torch.nn.Parameter]], Any]]] = {
    "sgd": ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=ALPHA0, momentum=0.9)),
    "rmsprop": (
        {"name": "rmsprop", "smoothing": 0.9, "eps": 1.0, "momentum": 0.9},
        lambda p: torch.optim.RMSprop(p, lr=ALPHA0, alpha=0.9, eps=1.0, momentum=0.9),
    ),
    "adam": ({"name": "adam", "eps": 1e-3}, lambda p: torch.optim.Adam(p, lr=ALPHA0, eps=1e-3)),
    "lamb": ({"name": "lamb", "beta2": Lamb.beta2, "eps": Lamb.eps, "weight_decay": 0.1}, lamb),
    "lars": ({"name": "lars", "trust": Lars.trust, "weight_decay": 0.1}, lars),
    "clipped": ({"name": "sgd", "momentum": 0.9}, Clipped),
    "adamw": ({"name": "adamw", "eps": 1e-3, "weight_decay": 0.3}, lambda p: torch.optim.AdamW(groups(p), lr=ALPHA0, eps=1e-3)),
}
#: What AdamW comes with: groups of parameters and a schedule of torch's, whose rates are factors of alpha0.
GROUPED = {
    "groups": {"weight_decay": {"*.bias": 0.0}, "rate": {"3.*": 0.25}},
    "schedule": {"name": "OneCycleLR", "kwargs": {"max_lr": 1.5}},
}

#: name -> (learners, ranks that are shards only, optimiser, protocol)
RUNS = {
    "hardsync-S3": (2, 3, "adam", {"name": "hardsync"}),
    "groups-S2": (3, 2, "adamw", {"name": "hardsync"}),
    "lamb-S2": (2, 2, "lamb", {"name": "hardsync"}),
    "lars-S1": (2, 1, "lars", {"name": "hardsync"}),
    "clipped-S3": (2, 3, "clipped", {"name": "hardsync"}),
    "clipped-allreduce": (3, 0, "clipped", {"name": "allreduce"}),
    "hardsync-4": (4, 1, "sgd", {"name": "hardsync"}),
    "hardsync-4-again": (4, 1, "sgd", {"name": "hardsync"}),
    "allreduce-5": (5, 0, "rmsprop", {"name": "allreduce"}),
    "lambda1-softsync": (1, 2, "sgd", {"name": "softsync", "n": 1}),
}
LATER = {"hardsync-S3", "lamb-S2", "lars-S1", "clipped-allreduce", "lambda1-softsync"}
"""Whose step is the same without ranks, or in other runs."""
if not EVERYTHING or REST:
    RUNS = {name: run for name, run in RUNS.items() if (name in LATER) == REST}
#: Slices of whole layers; and what is no plain loop, but proved.
MORE: dict[str, dict[str, Any]] = {
    "lamb-S2": {"per_layer": True},
    **{key: {"clip_average": 0.2} for key in ("clipped-S3", "clipped-allreduce")},
    "rates": {"modulate": "rate", "alpha0": 0.002},
}
STALE = {"rates": (3, 2, "adamw", {"name": "softsync", "n": 2})}


def job(directory: Path, name: str) -> dict:
    learners, shards, optimizer, protocol = (RUNS | STALE)[name]
    config = {
        "out": str(directory / name),
        "protocol": protocol,
        "shards": max(1, shards),
        "optimizer": OPTIMIZERS[optimizer][0],
        "model": {"name": "mlp", "hidden": [24]},
        "alpha0": ALPHA0,
        "mu": MU,
        "seed": SEED,
        "epochs": EPOCHS,
        "threads": 1,
        "memory_format": "contiguous",
        "log": {"progress": "off"},
        **(GROUPED if optimizer == "adamw" else {}),
        **MORE.get(name, {}),
    }
    return {"ranks": learners + shards, "config": config, "record": str(directory / f"{name}.npy")}


SHARED = Shared([("send", name) for name in RUNS | STALE], job)


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


def serial(batch: int, updates: int, optimizer: str) -> np.ndarray:
    """Weights before each update, (updates, parameters), of SGD with mini-batches of `batch` samples."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    steps = OPTIMIZERS[optimizer][1](model.parameters())
    cycle = None
    if optimizer == "adamw":
        highest = [1.5 * group["lr"] for group in steps.param_groups]
        cycle = torch.optim.lr_scheduler.OneCycleLR(steps, highest, updates)
    sampling = EpochSampling(len(digits.train), batch, 1, SEED)
    seen = []
    for seq in range(updates):
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
        inputs, targets = digits.train.batch(sampling.indices(0, seq))
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        steps.step()
        if cycle is not None:
            cycle.step()
    return np.array(seen)


@pytest.mark.deeper
@pytest.mark.parametrize("name", RUNS)
def test_equals_serial_sgd_at_every_update(runs: Path, name: str) -> None:
    learners, _, optimizer, _ = RUNS[name]
    recorded = np.load(runs / f"{name}.npy")
    with as_in_the_run(1):
        expected = serial(learners * MU, len(recorded), optimizer)
    assert len(recorded) == -(-int(EPOCHS * 1437 + 0.999) // (learners * MU))
    moved = np.abs(expected[-1] - expected[0]).max()
    assert moved > 0.01, "the serial run must have gone somewhere"
    assert np.abs(recorded - expected).max() < 2e-4 * moved


@pytest.mark.deeper
@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("lamb-", "lars-", "clipped-"))] + ["rates"])
def test_replay_proves_it(runs: Path, name: str) -> None:
    def model(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return models.make(MlpOptions(hidden=(24,)), input_shape=input_shape, classes=classes, seed=SEED)

    assert replay(runs / name, UserObjects(model, torch.nn.functional.cross_entropy)).holds


def test_a_rate_is_the_mean_of_its_gradients_weights(runs: Path) -> None:
    run = Run(runs / "rates")
    applied = run.pushes[run.pushes["verdict"] == 0]
    for update in run.updates:
        mine = applied[(applied["shard"] == update["shard"]) & (applied["clock"] == update["clock"] - 1)]
        before = mine["learning_rate"][0]
        assert update["learning_rate"] == pytest.approx(before * np.average(mine["weight"], weights=mine["gradients"]), rel=1e-12)


def test_same_seed_same_bits(runs: Path) -> None:
    first, second = (np.load(runs / f"{name}.npy") for name in ("hardsync-4", "hardsync-4-again"))
    assert first.tobytes() == second.tobytes()
    states = [torch.load(runs / name / "weights.pt", weights_only=True)["theta"] for name in ("hardsync-4", "hardsync-4-again")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
