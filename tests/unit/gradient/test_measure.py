"""Loss and error against a computation by hand, and batch-norm statistics measured anew at the weights to evaluate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.config import Config, EvaluationOptions, Part
from mpisgd.data import DataSet, Split
from mpisgd.data.sampling import recalibration_batches
from mpisgd.gradient.measure import Measure, batch_norm_policy, batch_norms, recalibrate
from mpisgd.vectors.flat import FlatModel
from tests.unit.fakes import mean_loss


def split(samples: int, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    return Split(torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator))


LOSS = nn.functional.cross_entropy


def measure(module: nn.Module, train: Split, test: Split, loss: Any = nn.functional.cross_entropy, **fields: Any) -> Measure:
    given = {"batch": 4, "buffers": "recalibrate", "recalibrate_batches": 3, "seed": 1, **fields}
    return Measure(FlatModel(module), loss, data=DataSet("data", train, test), **given)


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
        assert measured.of(Part(which))[:2] == pytest.approx((-likelihood.mean().item(), wrong / len(data)), rel=1e-5)


def test_an_empty_split_has_neither_loss_nor_error() -> None:
    assert all(map(math.isnan, measure(nn.Linear(5, 3), split(4), split(0)).of(Part.TEST)[:2]))


def test_targets_that_are_no_classes_have_a_loss_and_no_error() -> None:
    data = Split(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [0.0], [6.0]]))
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    loss, error, _ = measure(module, data, data, loss=mean_loss, batch=2).of(Part.TEST)
    assert loss == pytest.approx((1.0 + 4.0 + 9.0) / 3)
    assert math.isnan(error)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(5, momentum=0.2), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def test_recalibration_is_the_plain_mean_over_mini_batches() -> None:
    """Not a moving average, which would remember the weights before; variances are the unbiased ones that torch keeps."""
    train, module = split(40), normed()
    model = FlatModel(module)
    module[0].running_mean.fill_(77.0)
    module[0].num_batches_tracked.fill_(9)
    recalibrate(model, LOSS, train, batch=4, batches=3, seed=7)
    batches = train.inputs[np.stack(recalibration_batches(40, 4, 3, seed=7))].numpy()
    assert batches.shape == (3, 4, 5)
    np.testing.assert_allclose(module[0].running_mean, batches.mean(axis=1).mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(module[0].running_var, batches.var(axis=1, ddof=1).mean(axis=0), rtol=1e-4)
    assert [layer.momentum for layer in batch_norms(module)] == [0.2, 0.1]
    assert module.training


def test_recalibration_takes_what_there_is() -> None:
    """Fewer samples than wanted: all, in mini-batches as equal as can be, for each counts as much. A single one has no variance."""
    train, module = split(6), normed()
    recalibrate(FlatModel(module), LOSS, train, batch=5, batches=20, seed=1)
    np.testing.assert_allclose(module[0].running_mean, train.inputs.mean(dim=0), rtol=1e-4, atol=1e-6)
    assert int(module[0].num_batches_tracked) == 2
    recalibrate(FlatModel(module), LOSS, split(1), batch=5, batches=20, seed=1)
    assert int(module[0].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("size", "batch", "batches"), [(1000, 50, 20), (1001, 50, 20), (1000, 7, 3), (10, 50, 20), (51, 50, 20), (0, 4, 2)]
)
def test_the_samples_are_distinct_random_and_the_same_everywhere(size: int, batch: int, batches: int) -> None:
    """A function of the seed alone: not of a rank, of how often was evaluated, nor of torch's generators."""
    drawn = recalibration_batches(size, batch, batches, seed=1)
    chosen = np.concatenate([np.empty(0, np.int64), *drawn])
    assert len(set(chosen.tolist())) == len(chosen) == min(size, batch * batches)
    assert all(0 <= each < size for each in chosen)
    assert max(map(len, drawn), default=0) <= batch
    assert max(map(len, drawn), default=0) - min(map(len, drawn), default=0) <= 1
    again = recalibration_batches(size, batch, batches, seed=1)
    assert [each.tolist() for each in again] == [each.tolist() for each in drawn]
    if size > 10:
        assert chosen.tolist() != np.concatenate(recalibration_batches(size, batch, batches, seed=2)).tolist()
        assert abs(chosen.mean() / size - 0.5) < 0.2, "not the first ones"


def test_nothing_but_the_seed_and_the_weights_decides() -> None:
    """Dropout before a layer draws nothing: statistics are those of the network that is evaluated."""
    train, found = split(40), []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3))
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        recalibrate(FlatModel(module), LOSS, train, batch=8, batches=3, seed=1)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(module[2].running_mean.clone())
    assert torch.equal(*found)


def test_the_report_says_how_many_samples() -> None:
    def policy(module: nn.Module, samples: int, **options: Any) -> str:
        return batch_norm_policy(module, Config(evaluation=EvaluationOptions(**options)), samples)

    anew = {"buffers": "recalibrate", "batch": 100, "recalibrate_batches": 3}
    assert policy(normed(), 1437, **anew) == "recalibrate on 300 of 1,437 training samples, drawn at random (2 layers)"
    assert policy(normed(), 250, **anew) == "recalibrate on 250 of 250 training samples, drawn at random (2 layers)"
    assert policy(normed(), 9, buffers="initial") == "initial (2 layers)"
    assert policy(normed(), 9) == "learner 0's (2 layers)"
    assert policy(nn.Linear(2, 2), 9) == "no batch-norm layers"
    assert policy(nn.utils.spectral_norm(nn.Linear(2, 2)), 9) == "no batch-norm layers, buffers: learner 0's"  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("buffers", ["recalibrate", "initial"])
def test_the_policy_decides(buffers: str) -> None:
    module = normed()
    measured = measure(module, split(40), split(8), buffers=buffers)
    measured.prepare()
    changed = bool(module[0].running_mean.any())
    assert changed is (buffers == "recalibrate")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = measured.of(Part.TEST)
    assert measured.of(Part.TEST) == first  # no dropout, and statistics are used, not gathered
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


def test_initial_statistics_are_those_that_the_factory_made_also_where_a_learner_evaluates() -> None:
    module = normed()
    with torch.no_grad():
        module[0].running_mean.fill_(0.25)  # a network that was trained before
    measured = measure(module, split(8), split(8), buffers="initial")
    module.train()
    module(torch.randn(8, 5))
    assert not torch.equal(module[0].running_mean, torch.full((5,), 0.25))
    measured.prepare()
    assert torch.equal(module[0].running_mean, torch.full((5,), 0.25))
    assert module[0].num_batches_tracked == 0
