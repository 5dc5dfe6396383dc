"""Loss and error against a computation by hand, and batch-norm statistics measured anew at the weights to evaluate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.data import Split
from mpisgd.flat import FlatModel
from mpisgd.measure import Measure, batch_norms, recalibrate
from tests.unit.fakes import mean_loss


def split(samples: int, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    return Split(torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator))


def measure(module: nn.Module, train: Split, test: Split, loss: Any = nn.functional.cross_entropy, **fields: Any) -> Measure:
    given = {"batch": 4, "buffers": "recalibrate", "recalibrate_batches": 3, **fields}
    return Measure(FlatModel(module), loss, train=train, test=test, **given)


@pytest.mark.parametrize("batch", [1, 4, 7, 11, 500])
def test_loss_and_error_are_those_of_all_samples(batch: int) -> None:
    """Whatever the batch, also where the last one is smaller: a mean of means would be wrong."""
    train, test = split(6, 1), split(11, 2)
    module = nn.Linear(5, 3)
    measured = measure(module, train, test, batch=batch)
    for which, data in ((False, test), (True, train)):
        scores = data.inputs.double() @ module.weight.detach().double().T + module.bias.detach().double()
        likelihood = torch.log_softmax(scores, dim=1)[torch.arange(len(data)), data.targets]
        wrong = sum(int(score.argmax()) != int(target) for score, target in zip(scores, data.targets, strict=True))
        assert measured.of(train=which) == pytest.approx((-likelihood.mean().item(), wrong / len(data)), rel=1e-5)


def test_an_empty_split_has_neither_loss_nor_error() -> None:
    assert all(map(math.isnan, measure(nn.Linear(5, 3), split(4), split(0)).of(train=False)))


def test_targets_that_are_no_classes_have_a_loss_and_no_error() -> None:
    data = Split(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [0.0], [6.0]]))
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    loss, error = measure(module, data, data, loss=mean_loss, batch=2).of(train=False)
    assert loss == pytest.approx((1.0 + 4.0 + 9.0) / 3)
    assert math.isnan(error)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(5, momentum=0.2), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def test_recalibration_is_the_plain_mean_over_the_first_mini_batches() -> None:
    """Not a moving average, which would remember the weights before; variances are the unbiased ones that torch keeps."""
    train, module = split(40), normed()
    model = FlatModel(module)
    module[0].running_mean.fill_(77.0)
    module[0].num_batches_tracked.fill_(9)
    recalibrate(model, train, batch=4, batches=3)
    batches = train.inputs[:12].reshape(3, 4, 5).numpy()
    np.testing.assert_allclose(module[0].running_mean, batches.mean(axis=1).mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(module[0].running_var, batches.var(axis=1, ddof=1).mean(axis=0), rtol=1e-4)
    assert [layer.momentum for layer in batch_norms(module)] == [0.2, 0.1]
    assert module.training


def test_recalibration_takes_what_there_is() -> None:
    """Fewer samples than wanted; a last mini-batch of one has no variance and is left out."""
    train, module = split(5), normed()
    recalibrate(FlatModel(module), train, batch=4, batches=20)
    np.testing.assert_allclose(module[0].running_mean, train.inputs[:4].mean(dim=0), rtol=1e-4, atol=1e-6)
    assert int(module[0].num_batches_tracked) == 1


@pytest.mark.parametrize("buffers", ["recalibrate", "initial"])
def test_the_policy_decides(buffers: str) -> None:
    module = normed()
    measured = measure(module, split(40), split(8), buffers=buffers)
    measured.prepare()
    changed = bool(module[0].running_mean.any())
    assert changed is (buffers == "recalibrate")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = measured.of(train=False)
    assert measured.of(train=False) == first  # no dropout, and statistics are used, not gathered
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.training


def test_a_model_without_batch_norm_is_not_run_to_recalibrate() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(inputs)

    module = Counting(5, 3)
    measure(module, split(8), split(8)).prepare()
    assert module.calls == 0
    untracked = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False))
    assert batch_norms(untracked) == []
