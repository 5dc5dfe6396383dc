"""LARS and LAMB as their papers write them, on tensors by name: what the shards' are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class _Loop:
    """`step` takes gradients by name; those whose names are `plain` have the ratio 1 and no weight decay."""

    def __init__(self, weights: Mapping[str, Tensor], rate: float, decay: float, plain: Callable[[str], bool]) -> None:
        self.weights, self.rate, self.decay, self.plain = dict(weights), rate, decay, plain
        self.momenta = {name: torch.zeros_like(each) for name, each in weights.items()}
        self.factors: dict[str, float] = {}
        """Of the rate."""

    def zero_grad(self) -> None:
        for each in self.weights.values():
            each.grad = None

    def step(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        with torch.no_grad():
            for name, each in self.weights.items():
                gradient = each.grad if gradients is None else gradients[name]
                assert gradient is not None
                decay = 0.0 if self.plain(name) else self.decay
                self.update(name, each, gradient, self.rate * self.factors.get(name, 1.0), decay)

    def update(self, name: str, w: Tensor, g: Tensor, gamma: float, beta: float) -> None:
        raise NotImplementedError


class Lars(_Loop):
    """arXiv:1708.03888, Alg. 1, eq. 6."""

    momentum, trust = 0.9, 0.02

    def update(self, name: str, w: Tensor, g: Tensor, gamma: float, beta: float) -> None:
        ratio = 1.0
        if not self.plain(name) and w.norm() > 0:
            ratio = self.trust * w.norm() / (g.norm() + beta * w.norm())
        self.momenta[name] = self.momentum * self.momenta[name] + gamma * ratio * (g + beta * w)
        w -= self.momenta[name]


class Lamb(_Loop):
    """arXiv:1904.00962, Alg. 2."""

    beta1, beta2, eps = 0.9, 0.99, 1e-3

    def __init__(self, weights: Mapping[str, Tensor], rate: float, decay: float, plain: Callable[[str], bool]) -> None:
        super().__init__(weights, rate, decay, plain)
        self.squares = {name: torch.zeros_like(each) for name, each in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    def update(self, name: str, w: Tensor, g: Tensor, gamma: float, beta: float) -> None:
        self.counts[name] += 1
        self.momenta[name] = self.beta1 * self.momenta[name] + (1 - self.beta1) * g
        self.squares[name] = self.beta2 * self.squares[name] + (1 - self.beta2) * g**2
        m = self.momenta[name] / (1 - self.beta1 ** self.counts[name])
        v = self.squares[name] / (1 - self.beta2 ** self.counts[name])
        step = m / (v.sqrt() + self.eps) + beta * w
        ratio = 1.0 if self.plain(name) or w.norm() == 0 else w.norm() / step.norm()
        w -= gamma * ratio * step


def no_bias(names: Iterable[str] = ("bias",)) -> Callable[[str], bool]:
    """Whether a name ends in one of these."""
    return lambda name: any(name.endswith(each) for each in names)
