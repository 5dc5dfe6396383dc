"""Sandblaster L-BFGS beside others: torch's in one process, on several models and shards, and scipy's on a convex problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records.log.reader import Run
from mpisgd.simulate.job import simulate
from tests.effort import spread
from tests.virtual.test_sandblaster import MODELS, by_torch, job, weights_of

IMAGES = {"name": "synthetic", "samples": 24, "test_samples": 2, "shape": [1, 28, 28], "classes": 10}
MNIST_NETWORK: dict[str, Any] = {"model": "mnist_cnn", "data": IMAGES, "mu": 12, "threads": 1}
ALL: dict[str, tuple[dict[str, Any], UserObjects]] = {**MODELS, "the MNIST network": (MNIST_NETWORK, NO_OBJECTS)}
DECAY = 0.05


@pytest.mark.slow
def test_the_mnist_network_has_the_bits_of_torch_with_one_shard(tmp_path: Path) -> None:
    """Other models: `test_sandblaster`."""
    options = {"order": "portions", "tolerance_grad": 0.0, "iterations": 4}
    config = job(tmp_path / "run", **MNIST_NETWORK, protocol=options)
    simulate(config)
    losses, weights = by_torch(config)
    assert Run(tmp_path / "run").updates["mean_loss"].tolist() == losses
    assert torch.equal(weights_of(tmp_path / "run", config), weights)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", spread(ALL, 4))
def test_three_shards_come_to_the_losses_of_one_but_for_rounding(name: str, tmp_path: Path) -> None:
    """One shard's are torch's. Sums over slices are rounded otherwise: the first line search of the MNIST network, along which the
    loss is all but linear, makes 1e-2 of a rounding in its step, in torch alone as well; so it has none here."""
    changes, user_objects = ALL[name]
    search = "none" if name == "the MNIST network" else "strong_wolfe"
    options = {"order": "portions", **changes.get("protocol", {}), "iterations": 5, "line_search": search}
    found = []
    for shards in (1, 3):
        config = job(tmp_path / str(shards), **{**changes, "shards": shards, "protocol": options, "threads": 1})
        simulate(config, user_objects)
        found.append(Run(tmp_path / str(shards)).of_coordinator("iterations")["loss"])
    assert len(found[0]) == 5
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[1].tolist() != found[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.rare), 3])
def test_a_convex_problem_comes_to_the_loss_of_scipy(shards: int, tmp_path: Path) -> None:
    """Softmax regression with weight decay, in float64 there."""
    optimize = pytest.importorskip("scipy.optimize")
    protocol = {"iterations": 100, "history": 10, "weight_decay": DECAY}
    config = job(tmp_path / "run", data="digits", mu=100, shards=shards, protocol=protocol, threads=1)
    simulate(config)
    data = parts.load_data(config, NO_OBJECTS)
    size = parts.build_model(config, parts.meta_of(data), NO_OBJECTS).size
    inputs, targets = data.train.batch(np.arange(len(data.train)))
    inputs = inputs.flatten(1).double()

    def of(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.tensor(flat, requires_grad=True)
        output = inputs @ weights[:-10].view(10, -1).T + weights[-10:]
        loss = torch.nn.functional.cross_entropy(output, targets) + DECAY / 2 * weights.dot(weights)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), weights.grad.numpy()  # type: ignore[union-attr]

    found = optimize.minimize(of, np.zeros(size), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    assert Run(tmp_path / "run").of_coordinator("iterations")["loss"][-1] == pytest.approx(found.fun, abs=1e-6)
