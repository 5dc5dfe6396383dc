"""DC-ASGD's correction of stale gradients, by hand and against its purpose."""

from __future__ import annotations

import pytest
import torch

from mpisgd.config import SgdOptions, footprint
from mpisgd.update.compensation import Compensation
from mpisgd.update.slice_update import SliceUpdate
from tests.unit.fakes import tensor
from tests.unit.update.give import give


def test_by_hand() -> None:
    """g + lambda g g (theta - theta_bak): 2 + 0.5 * 4 * (1 - 0) = 4; -1 + 0.5 * 1 * (3 - 1) = 0."""
    weights = tensor(0.0, 1.0)
    compensation = Compensation(weights, 0.5, 0.0)
    compensation.given(0, 0)
    weights.copy_(tensor(1.0, 3.0))
    gradient = tensor(2.0, -1.0)
    compensation.compensate(gradient, 0)
    assert gradient.tolist() == [4.0, 0.0]


def test_the_adaptive_one_by_hand() -> None:
    """lambda / sqrt(v), v = 0.75 * 0 + 0.25 * 16 = 4, then 0.75 * 4 + 0.25 * 16 = 7."""
    weights = tensor(0.0)
    compensation = Compensation(weights, 0.5, 0.75)
    compensation.given(0, 0)
    weights.fill_(1.0)
    for mean_square in (4.0, 7.0):
        gradient = tensor(4.0)
        compensation.compensate(gradient, 0)
        assert gradient.item() == pytest.approx(4.0 + 0.5 / mean_square**0.5 * 16.0, rel=1e-6)


def test_a_fresh_gradient_stays_as_it_is() -> None:
    compensation = Compensation(tensor(0.3, -7.0), 2.0, 0.0)
    compensation.given(1, 5)
    gradient = tensor(0.1, -0.7)
    compensation.compensate(gradient, 5)
    assert torch.equal(gradient, tensor(0.1, -0.7))


def test_copies_are_kept_as_long_as_somebody_computes_from_them() -> None:
    compensation = Compensation(tensor(0.0), 1.0, 0.0)
    for learner_id in range(3):
        compensation.given(learner_id, 0)
    assert len(compensation._copies) == 1, "those of one clock share it"
    compensation.given(0, 4)
    compensation.given(0, 4)
    assert len(compensation._copies) == 2
    compensation.given(1, 4)
    compensation.gone(2)
    assert len(compensation._copies) == 1
    compensation.given(0, 6)
    compensation.given(1, 7)
    assert len(compensation._copies) == 2
    compensation.gone(0)
    compensation.gone(0)
    compensation.gone(1)
    assert len(compensation._copies) == 0


def test_there_are_never_more_copies_than_learners() -> None:
    """Nor while one is made: what is said of their memory rests on it."""
    compensation, beside = Compensation(tensor(0.0), 1.0, 0.0), []

    class Watched:
        def clone(self) -> torch.Tensor:
            beside.append(len(compensation._copies))
            return tensor(0.0)

    for clock in range(20):
        compensation.given(clock % 3, clock, Watched())  # type: ignore[arg-type]
    assert max(beside) + 1 == len(compensation._copies) == 3


@pytest.mark.parametrize(
    ("lambda_", "parameters", "shards", "text"),
    [
        (8, 3 * 2**20, 1, "up to 8 copies of the slice on each shard, 96.0 MiB"),
        (1000, 2**21 + 1, 2, "up to 1,000 copies of the slice on each shard, 4,000.0 MiB"),
        (1, 2**18, 4, "up to 1 copy of the slice on each shard, 0.2 MiB"),
    ],
)
def test_what_they_cost_in_memory(lambda_: int, parameters: int, shards: int, text: str) -> None:
    assert footprint.of_compensation(lambda_, parameters, shards) == text


def test_it_comes_before_weight_and_momentum() -> None:
    weights = tensor(1.0)
    update = SliceUpdate(
        weights,
        SgdOptions(momentum=0.9),
        learning_rate=0.1,
        schedule=lambda _: 1.0,
        train_samples=1,
        compensation=Compensation(weights, 0.5, 0.0),
    )
    compensation = update.compensation
    assert compensation is not None
    compensation.given(0, 0)
    compensation.given(1, 0)
    give(update, 2.0, 1.0, 1, timestamp=0)
    update.step()
    assert update.weights.item() == pytest.approx(0.8)
    give(update, 2.0, 0.5, 1, timestamp=0)
    step = update.step()
    corrected = 0.5 * (2.0 + 0.5 * 4.0 * (0.8 - 1.0))
    assert update.weights.item() == pytest.approx(0.8 - 0.1 * (corrected + 0.9 * 2.0))
    assert step.gradient_sq in (pytest.approx(corrected**2), pytest.approx(float("nan"), nan_ok=True))


@pytest.mark.parametrize("strength", [1.0])
def test_it_comes_nearer_to_the_gradient_at_the_present_weights(strength: float) -> None:
    """Of a logistic loss, whose second derivative is g * g in the mean [Zheng17 3]: over many samples the error shrinks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, generator=generator)
    labels = torch.where(torch.rand(4000, generator=generator) < torch.sigmoid(inputs), 1.0, -1.0)

    def gradients(theta: float) -> torch.Tensor:
        return -labels * inputs * torch.sigmoid(-labels * inputs * theta)

    before, now = 0.9, 1.1
    stale, fresh = gradients(before), gradients(now)
    weights = torch.full_like(inputs, before)
    compensation = Compensation(weights, strength, 0.0)
    compensation.given(0, 0)
    weights.fill_(now)
    corrected = stale.clone()
    compensation.compensate(corrected, 0)
    assert abs(corrected.mean() - fresh.mean()) < 0.3 * abs(stale.mean() - fresh.mean())
