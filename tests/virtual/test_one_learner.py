"""With one learner every protocol is serial SGD; with steps of its own, the algorithm of [Dean12 4.1] written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.protocols import PROTOCOLS
from tests.effort import spread
from tests.virtual.jobs import TENSORS, config, simulated

ALPHA = 0.1
ALONE: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in PROTOCOLS},
    "backup": {"name": "backup", "N": 1},
    "backup late": {"name": "backup", "N": 1, "late": "apply"},
    "ssp s=0": {"name": "ssp", "slack": 0},
    "versioned tolerance=2": {"name": "versioned", "tolerance": 2},
    "async ramp": {"name": "async", "warm_up": 3, "ramp": 10},
}


def weights(directory: Path, protocol: dict[str, Any], **changes: Any) -> torch.Tensor:
    """The last weights of a virtual run with one learner, flat."""
    options = {"virtual": {"learners": 1}, "optimizer": {"name": "sgd", "momentum": 0.0}, "alpha0": ALPHA, "epochs": 1}
    simulated(directory, TENSORS, **{**options, "protocol": protocol, **changes})
    state = torch.load(directory / "weights.pt", weights_only=True)["theta"]
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


class ByHand:
    """The model and mini-batches of such a run, and its gradients by autograd."""

    def __init__(self, directory: Path) -> None:
        self.config: Config = config(directory, TENSORS, virtual={"learners": 1})
        data = parts.load_data(self.config, NO_OBJECTS)
        meta = parts.meta_of(data)
        self.split = data.train
        self.sampling = parts.make_sampling(self.config, meta, 1)
        self.module = parts.build_model(self.config, meta, NO_OBJECTS).module
        self.mini_batches = meta.train_samples // self.config.mu

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.module.parameters()]).clone()

    def gradient(self, at: torch.Tensor, seq: int) -> torch.Tensor:
        torch.nn.utils.vector_to_parameters(at, self.module.parameters())
        self.module.zero_grad()
        inputs, targets = self.split.batch(self.sampling.indices(0, seq))
        torch.nn.functional.cross_entropy(self.module(inputs), targets).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.module.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("name", spread(ALONE, 2))
def test_it_is_serial_sgd(name: str, tmp_path: Path) -> None:
    by_hand = ByHand(tmp_path / "by_hand")
    theta = by_hand.weights()
    for seq in range(by_hand.mini_batches):
        theta = theta - ALPHA * by_hand.gradient(theta, seq)
    torch.testing.assert_close(weights(tmp_path / "run", ALONE[name]), theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("protocol", "n_push", "n_fetch"),
    [
        ({"name": "downpour", "n_push": 1, "n_fetch": 5}, 1, 5),
        ({"name": "downpour", "n_push": 2}, 2, 2),
        ({"name": "downpour", "n_push": 2, "n_fetch": 6, "local_alpha": 0.03}, 2, 6),
        ({"name": "ssp", "get_model_frequency": 3}, 1, 3),
    ],
)
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_local_steps_are_those_of_downpour(
    protocol: dict[str, Any], n_push: int, n_fetch: int, shards: int, tmp_path: Path
) -> None:
    """[Dean12, Algorithm 7.1], line by line; the run has so many mini-batches that the last round is whole."""
    by_hand = ByHand(tmp_path / "by_hand")
    alpha = protocol.get("local_alpha", ALPHA)
    server = by_hand.weights()
    accrued = torch.zeros_like(server)
    for seq in range(by_hand.mini_batches):
        if seq % n_fetch == 0:
            own = server.clone()
        gradient = by_hand.gradient(own, seq)
        accrued += gradient
        own = own - alpha * gradient
        if (seq + 1) % n_push == 0:
            server = server - ALPHA * accrued
            accrued = torch.zeros_like(server)
    found = weights(tmp_path / "run", protocol, shards=shards)
    torch.testing.assert_close(found, server, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("protocol", ["hardsync", "backup", "timeout", "versioned"])
def test_there_is_nothing_to_compensate_where_no_gradient_is_stale(protocol: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"compensation = 0\.04: expected 0 beside protocol {protocol} \(applies no stale gradients\): "
    ):
        simulated(tmp_path / "run", TENSORS, protocol=protocol, compensation=0.04)
    if protocol == "backup":
        simulated(tmp_path / "run", TENSORS, protocol={"name": "backup", "late": "apply"}, compensation=0.04, epochs=0.2)
