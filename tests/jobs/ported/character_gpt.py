"""A GPT of characters: blocks with causal attention, tied embeddings, GELU, AdamW without decay of biases and gains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.jobs.ported.text import TEXT
from tests.torch_law.law import Idiom

LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH = 16, 24


class Letters(Dataset[Any]):
    """Pieces of the text, and the same one letter later."""

    def __init__(self, begin: int, end: int) -> None:
        self.numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT[begin:end]])

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.numbers[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = (each.view(batch, time, 2, -1).transpose(1, 2) for each in self.attend(self.before(x)).chunk(3, dim=2))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, time, WIDTH))
        found: Tensor = x + self.think(self.between(x))
        return found


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letter.weight
        for name, each in self.named_parameters():
            if each.dim() == 2:
                nn.init.normal_(each, std=0.02 if "join" not in name else 0.01)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.last(self.blocks(self.letter(x) + self.place.weight[: x.shape[1]])))
        return found


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


IDIOM = Idiom(
    Gpt,
    lambda: (Letters(0, 4800), Letters(4800, 6000)),
    loss,
    optimizer=lambda them: torch.optim.AdamW(them, lr=0.003, betas=(0.9, 0.95), weight_decay=0.1),
    config={"optimizer": {"name": "adamw", "beta2": 0.95, "weight_decay": 0.1}, "alpha0": 0.003, "mu": 12, "epochs": 4},
)
