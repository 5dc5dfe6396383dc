"""The networks of the cases in plain torch, for peers that run where mpisgd is not installed; those of `mpisgd.models`, checked by
a test. And one that leaves the cores to the exchange, as on nodes that compute on GPUs, or have a core for each rank."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

WARM_UP = 10
PACED = "paced-16"
PACE_S = 0.33
"""Seconds in which the layers of `paced` wait in a mini-batch, a third of them in the forward pass: as long as a link of 1 Gbit/s
takes for its 41 MB."""


def make(case: str, memory_format: torch.memory_format = torch.channels_last) -> nn.Module:
    """The network of a case; its weights in the memory format that is faster, unless a peer does not take that."""
    if case == PACED:
        return paced()
    if case.startswith("cnn"):
        module = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.ReLU(),
            nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, stride=2, ceil_mode=True),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, stride=2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )
    else:
        module = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 2500), nn.ReLU(), nn.Linear(2500, 1300), nn.ReLU(), nn.Linear(1300, 10)
        )
    return module.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


class Batches:
    """Random mini-batches out of 2048 random images."""

    def __init__(self, mu: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._images = torch.randn(2048, 3, 32, 32, generator=self._generator)
        self._targets = torch.randint(10, (2048,), generator=self._generator)
        self._mu = mu

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(2048, (self._mu,), generator=self._generator)
        return self._images[at].contiguous(memory_format=torch.channels_last), self._targets[at]


class _Wait(torch.autograd.Function):
    """Waits for so many seconds in the forward pass, and for twice as many in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Pace(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Wait.apply(inputs, self.seconds)  # type: ignore[no-untyped-call]
        return output


def paced() -> nn.Module:
    """Layers of a million parameters, 10 M in all, each of which waits while it seems to compute."""
    sizes = [192, *[1000] * 11, 10]
    layers: list[nn.Module] = [nn.AvgPool2d(4), nn.Flatten()]
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), Pace(PACE_S / 3 / (len(sizes) - 1)), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
