"""A model of words: an LSTM over a stream that deals the lines of a text to workers, gradients clipped, SGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset, get_worker_info

from tests.jobs.ported.rows import Rows
from tests.jobs.ported.text import TEXT
from tests.torch_law.law import Idiom

WORDS = sorted(set(TEXT.split()))
NUMBERS = [WORDS.index(word) for word in TEXT.split()]
LENGTH = 8


class Lines(IterableDataset[Any]):
    """Runs of words, each worker every n-th."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def __len__(self) -> int:
        return (self.end - self.begin) // LENGTH

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for line in range(first, len(self), step):
            words = NUMBERS[self.begin + line * LENGTH : self.begin + (line + 1) * LENGTH + 1]
            yield torch.tensor(words[:-1]), torch.tensor(words[1:])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(len(WORDS), 16), nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, len(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.memory(self.words(x))[0])
        return found


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), targets)


def held_out() -> Rows:
    return Rows(list(Lines(len(NUMBERS) * 4 // 5, len(NUMBERS) - 1)))


IDIOM = Idiom(
    Words,
    lambda: (Lines(0, len(NUMBERS) * 4 // 5), held_out()),
    loss,
    optimizer=lambda them: torch.optim.SGD(them, lr=1.0),
    config={"optimizer": "sgd", "alpha0": 1.0, "sampling": "stream", "mu": 4, "epochs": 3},
)
