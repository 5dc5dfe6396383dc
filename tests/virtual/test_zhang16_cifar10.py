"""`jobs/zhang16-cifar10.toml` beside a loop written out by hand, with Caffe's rates and weight decays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpisgd import models
from mpisgd.config import config_file, replace
from mpisgd.config.config_virtual import VirtualOptions
from mpisgd.data import cifar10, load
from mpisgd.job.parts import make_sampling, meta_of
from mpisgd.simulate import simulate
from tests.unit.data.test_data_cifar10 import RECORDS, write_folder

JOB = Path(__file__).parents[2] / "jobs" / "zhang16-cifar10.toml"
UPDATES = 3


def outputs(weights: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x / (1 + 5e-5 * F.avg_pool2d(x**2, 3, stride=1, padding=1)) ** 0.75

    def convolved(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=2)

    x = normalised(F.relu(F.max_pool2d(convolved("conv1", pixels), 3, 2, ceil_mode=True)))
    x = normalised(F.avg_pool2d(F.relu(convolved("conv2", x)), 3, 2, ceil_mode=True))
    x = F.avg_pool2d(F.relu(convolved("conv3", x)), 3, 2, ceil_mode=True)
    return F.linear(x.flatten(1), weights["ip1.weight"], weights["ip1.bias"])


def test_the_papers_job_trains_as_caffes_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", RECORDS)
    write_folder(tmp_path / "cifar10" / "cifar-10-batches-bin")
    config = replace(config_file.read(JOB), data_dir=str(tmp_path), virtual=VirtualOptions(learners=1), out=str(tmp_path / "run"))
    config = replace(config, epochs=UPDATES * config.mu / (5 * RECORDS))
    data = load(config.data, data_dir=str(tmp_path), seed=config.seed)
    model = models.make(config.model, input_shape=data.input_shape, classes=data.classes, seed=config.seed)
    drawn = torch.Generator().manual_seed(1)
    # far larger than Caffe's first weights, with which the normalisation changes nothing yet
    weights = {name: 0.02 * torch.randn(tensor.shape, generator=drawn) for name, tensor in model.named_parameters()}
    torch.save(weights, tmp_path / "begun.pt")
    steps = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    sampling = make_sampling(config, meta_of(data, config), 1)
    for seq in range(UPDATES):
        chosen = sampling.indices(0, seq)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        pixels, labels = data.train.batch(chosen)
        assert float(pixels.abs().max()) > 100
        F.cross_entropy(outputs(leaves, pixels), labels).backward()
        for name, leaf in leaves.items():
            decay = {"ip1.weight": 250 * 0.004, "ip1.bias": 0.0}.get(name, 0.004)
            rate = 0.001 * (2 if name in ("conv1.bias", "conv2.bias", "ip1.bias") else 1)
            assert leaf.grad is not None
            steps[name] = 0.9 * steps[name] + leaf.grad + decay * weights[name]
            weights[name] -= rate * steps[name]
    outcome = simulate(replace(config, init_from=str(tmp_path / "begun.pt")))
    assert outcome.clocks == (UPDATES,)
    trained = torch.load(outcome.path / "weights.pt")["theta"]
    for name, tensor in weights.items():
        np.testing.assert_allclose(trained[name], tensor, rtol=1e-4, atol=1e-7, err_msg=name)
