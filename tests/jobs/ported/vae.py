"""A variational autoencoder of digits, whose loss is a sum over pixels and samples, and whose samples are drawn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from tests.jobs.ported.rows import Rows
from tests.torch_law.law import Idiom


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.mean, self.spread = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.outwards, self.pixels = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.inwards(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp() if self.training else mean
        return self.pixels(self.outwards(code).relu()).sigmoid(), mean, spread


def digits() -> Any:
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return Rows(images[:480]), Rows(images[480:640])


def step(model: nn.Module, batch: Tensor) -> Tensor:
    made, mean, spread = model(batch)
    return functional.binary_cross_entropy(made, batch, reduction="sum") - 0.5 * (1 + spread - mean**2 - spread.exp()).sum()


IDIOM = Idiom(
    Vae,
    digits,
    step=step,
    optimizer=lambda them: torch.optim.Adam(them, lr=0.002),
    config={"optimizer": "adam", "alpha0": 0.002, "mu": 16, "epochs": 6},
)
