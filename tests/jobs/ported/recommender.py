"""A recommender: embeddings of categories, a tower for numbers, products between all, and a click or none, by plain SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.jobs.ported.rows import Rows
from tests.torch_law.law import Idiom

SIZES, WIDTH = (12, 7, 20), 6


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum") for size in SIZES)
        self.below = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        pairs = (1 + len(SIZES)) * len(SIZES) // 2
        self.above = nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.below(numbers)
        rows = [table(categories[:, at : at + 1]) for at, table in enumerate(self.tables)]
        all_ = torch.stack([dense, *rows], dim=1)
        products = all_ @ all_.transpose(1, 2)
        first, second = torch.tril_indices(all_.shape[1], all_.shape[1], offset=-1)
        found: Tensor = self.above(torch.cat([dense, products[:, first, second]], dim=1)).squeeze(1)
        return found


def clicks() -> Any:
    """Numbers, categories, and whether somebody clicked, which depends on all of them."""
    draws = torch.Generator().manual_seed(0)
    numbers = torch.randn(480, 4, generator=draws)
    categories = torch.stack([torch.randint(size, (480,), generator=draws) for size in SIZES], dim=1)
    likes = [torch.randn(size, generator=draws) for size in SIZES]
    score = numbers[:, 0] + sum(like[categories[:, at]] for at, like in enumerate(likes))
    rows = [{"numbers": numbers[at], "categories": categories[at], "clicked": (score[at] > 0).float()} for at in range(480)]
    return Rows(rows[:400]), Rows(rows[400:])


def step(model: Any, batch: Any) -> Any:
    output = model(batch["numbers"], batch["categories"])
    wrong = ((output > 0) != (batch["clicked"] > 0)).float().mean()
    return {"loss": functional.binary_cross_entropy_with_logits(output, batch["clicked"]), "error": wrong}


IDIOM = Idiom(
    Recommender,
    clicks,
    step=step,
    optimizer=lambda them: torch.optim.SGD(them, lr=0.3),
    config={"optimizer": "sgd", "alpha0": 0.3, "mu": 8, "epochs": 6},
)
