"""Weights of stale gradients that multiply the rate of an update, in the place of its gradients [ElasticDL]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mpisgd.config import AdagradOptions, AdamwOptions, LambOptions, OptimizerOptions, SgdOptions
from mpisgd.update.slice_update import SliceUpdate, Weighting
from tests.unit.update.give import give

SIZE, RATE = 60, 0.1
TORCHS: dict[OptimizerOptions, Callable[[Any], torch.optim.Optimizer]] = {
    SgdOptions(momentum=0.9): lambda them: torch.optim.SGD(them, lr=RATE, momentum=0.9),
    AdagradOptions(): lambda them: torch.optim.Adagrad(them, lr=RATE),
    AdamwOptions(weight_decay=0.1): lambda them: torch.optim.AdamW(them, lr=RATE, weight_decay=0.1),
}
#: The weights of each update's gradients, and how many gradients each is the sum of.
UPDATES = (((1.0, 1),), ((0.5, 1), (0.25, 1), (1.0, 1)), ((1.0, 3), (0.2, 1)), ((1 / 3, 1),))


def made(options: OptimizerOptions, of: Any, updates: Sequence[Sequence[tuple[float, int]]] = UPDATES) -> SliceUpdate:
    update = SliceUpdate(
        torch.linspace(-1, 1, SIZE),
        options,
        learning_rate=RATE,
        schedule=lambda epochs: 1.0 if epochs < 4 else 0.5,
        train_samples=1,
        weighting=Weighting(of),
    )
    generator = torch.Generator().manual_seed(5)
    for gradients in updates:
        for weight, summed in gradients:
            give(update, summed * torch.randn(SIZE, generator=generator).numpy(), weight, samples=1, gradients=summed)
        before, step = update.learning_rate, update.step()
        mean = sum(weight * summed for weight, summed in gradients) / sum(summed for _, summed in gradients)
        assert step.learning_rate == (before * mean if of == "rate" else before)
    return update


@pytest.mark.parametrize("options", TORCHS, ids=lambda options: type(options).__name__)
def test_it_is_torchs_optimiser_at_the_mean_weights_rate(options: OptimizerOptions) -> None:
    """The mean counts each gradient once, also those that a team has summed."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    optimizer = TORCHS[options]([parameter])
    generator = torch.Generator().manual_seed(5)
    for factor, base, gradients in zip((1.0, 1.75 / 3, 3.2 / 4, 1 / 3), (1.0, 1.0, 0.5, 0.5), UPDATES, strict=True):
        divisor = sum(summed for _, summed in gradients)
        parameter.grad = torch.zeros(SIZE)
        for _, summed in gradients:
            parameter.grad += summed * torch.randn(SIZE, generator=generator) / divisor
        optimizer.param_groups[0]["lr"] = RATE * base * factor
        optimizer.step()
    torch.testing.assert_close(made(options, "rate").weights, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [AdagradOptions(), AdamwOptions(weight_decay=0.0), LambOptions()], ids=str)
def test_a_weight_that_all_gradients_share_does_not_cancel(options: OptimizerOptions) -> None:
    """In the sum it does; of the rate an update goes a tenth as far."""
    start = torch.linspace(-1, 1, SIZE)
    of_gradient, of_rate, full = (
        (made(options, of, [[(weight, 1)]]).weights - start).norm()
        for of, weight in (("gradient", 0.1), ("rate", 0.1), ("rate", 1.0))
    )
    assert float(of_gradient) == pytest.approx(float(full), rel=1e-3)
    assert float(of_rate) == pytest.approx(0.1 * float(full), rel=1e-3)


def test_an_update_of_nothing_leaves_weights_and_rate() -> None:
    update = made(SgdOptions(), "rate", [[(0.5, 1)], [(0.25, 1)]])
    weights = update.weights.clone()
    assert update.step().learning_rate == RATE
    assert torch.equal(update.weights, weights)
