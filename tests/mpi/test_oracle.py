"""Real ranks against serial SGD by torch.optim on the whole model, which nobody tuned (optimisers: `unit/test_update.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import data, models
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling

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


OPTIMIZERS = {
    "sgd": ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=ALPHA0, momentum=0.9)),
    "rmsprop": (
        {"name": "rmsprop", "smoothing": 0.9, "eps": 1.0, "momentum": 0.9},
        lambda p: torch.optim.RMSprop(p, lr=ALPHA0, alpha=0.9, eps=1.0, momentum=0.9),
    ),
    "adam": ({"name": "adam", "eps": 1e-3}, lambda p: torch.optim.Adam(p, lr=ALPHA0, eps=1e-3)),
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
    "groups-S1": (2, 1, "adamw", {"name": "hardsync"}),
    "groups-S2": (3, 2, "adamw", {"name": "hardsync"}),
    "groups-S3": (2, 3, "adamw", {"name": "hardsync"}),
    "hardsync-4": (4, 1, "sgd", {"name": "hardsync"}),
    "hardsync-4-again": (4, 1, "sgd", {"name": "hardsync"}),
    "allreduce-5": (5, 0, "rmsprop", {"name": "allreduce"}),
    "lambda1-softsync": (1, 2, "sgd", {"name": "softsync", "n": 1}),
}


def job(directory: Path, name: str) -> dict:
    learners, shards, optimizer, protocol = RUNS[name]
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
    }
    return {"ranks": learners + shards, "config": config, "record": str(directory / f"{name}.npy")}


SHARED = Shared([("send", name) for name in RUNS], job)


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


def serial(batch: int, updates: int, optimizer: str) -> np.ndarray:
    """Weights before each update, (updates, parameters), of SGD with mini-batches of `batch` samples."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    steps = OPTIMIZERS[optimizer][1](model.parameters())
    highest = [1.5 * group["lr"] for group in steps.param_groups]
    cycle = torch.optim.lr_scheduler.OneCycleLR(steps, highest, updates, cycle_momentum=False) if optimizer == "adamw" else None
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


@pytest.mark.parametrize("name", RUNS)
def test_equals_serial_sgd_at_every_update(runs: Path, name: str) -> None:
    learners, _, optimizer, _ = RUNS[name]
    recorded = np.load(runs / f"{name}.npy")
    expected = serial(learners * MU, len(recorded), optimizer)
    assert len(recorded) == -(-int(EPOCHS * 1437 + 0.999) // (learners * MU))
    moved = np.abs(expected[-1] - expected[0]).max()
    assert moved > 0.01, "the serial run must have gone somewhere"
    assert np.abs(recorded - expected).max() < 2e-4 * moved


def test_same_seed_same_bits(runs: Path) -> None:
    first, second = (np.load(runs / f"{name}.npy") for name in ("hardsync-4", "hardsync-4-again"))
    assert first.tobytes() == second.tobytes()
    states = [torch.load(runs / name / "weights.pt", weights_only=True)["theta"] for name in ("hardsync-4", "hardsync-4-again")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
