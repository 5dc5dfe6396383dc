"""The networks of the cases in plain torch, for peers that run where mpisgd is not installed; those of `mpisgd.models`, checked by
a test."""

from __future__ import annotations

import torch
from torch import nn

WARM_UP = 10


def make(case: str, memory_format: torch.memory_format = torch.channels_last) -> nn.Module:
    """The network of a case; its weights in the memory format that is faster, unless a peer does not take that."""
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
