"""Loss scaling: the gradient is that of the loss, the scale is halved where it overflows, and doubled after many that did not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpisgd.gradient import scaling
from mpisgd.gradient.scaling import LossScale
from mpisgd.vectors.flat import FlatModel


class Passes:
    """A model whose gradient is `size` in float16, which is infinite above 65504; counts its forward passes."""

    def __init__(self) -> None:
        self.model = FlatModel(nn.Linear(1, 1, bias=False), autocast="float16")
        self.calls = 0
        self.size = 1.0

    def __call__(self) -> Tensor:
        self.calls += 1
        return (self.model.weights * 0).sum() + (Half.apply(self.model.module.weight) * self.size).sum()  # type: ignore[no-untyped-call, operator]

    def gradient(self, scale: LossScale) -> float:
        self.model.zero_gradients()
        scale.passes(self, self.model)
        return self.model.gradients.item()


class Half(torch.autograd.Function):
    """As it is; of its gradient remains what float16 can hold."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.half().float()


def test_what_overflows_is_computed_again_at_half_the_scale() -> None:
    passes, scale = Passes(), LossScale()
    passes.size = 6.0
    assert passes.gradient(scale) == 6.0
    assert (passes.calls, scale.scale) == (4, 2.0**13), "6 * 2^13 is the first below 65504"
    assert passes.gradient(scale) == 6.0
    assert passes.calls == 5


def test_small_gradients_are_not_lost() -> None:
    passes = Passes()
    passes.size = 2.0**-26
    assert torch.tensor(passes.size).half() == 0
    assert passes.gradient(LossScale()) == 2.0**-26


def test_what_is_not_finite_without_a_scale_is_left_so() -> None:
    """After as many passes as there are scales, where the loss is finite; and the next one begins at the scale that was."""
    passes, scale = Passes(), LossScale()
    passes.size = 1e5
    assert passes.gradient(scale) == float("inf")
    assert (passes.calls, scale.scale) == (17, scaling.FIRST)
    passes.size, passes.calls = float("nan"), 0
    assert passes.gradient(scale) != 0
    assert (passes.calls, scale.scale) == (1, scaling.FIRST), "nor is a loss mended that is not finite"


def test_the_scale_grows_after_many_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROWS_AFTER", 3)
    passes, scale = Passes(), LossScale()
    passes.size, seen = 0.25, []
    for _ in range(9):
        assert passes.gradient(scale) == 0.25
        seen.append(scale.scale / scaling.FIRST)
    assert seen == [1, 1, 2, 2, 2, 4, 2, 2, 2], "0.25 * 2^18 overflows"
    monkeypatch.setattr(scaling, "LARGEST", scaling.FIRST)
    other = LossScale()
    assert [passes.gradient(other) for _ in range(4)] == [0.25] * 4
    assert other.scale == scaling.FIRST
