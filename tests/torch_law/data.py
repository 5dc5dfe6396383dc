"""Data: tensors, Datasets, collate functions, nests, types, batches that a DataLoader makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, random_split

from tests.torch_law.law import Idiom, vectors


def net() -> nn.Module:
    return nn.Linear(8, 2)


class Pairs(Dataset[Any]):
    """Samples as a tuple, a dict, or noisy ones."""

    def __init__(self, how: str, count: int = 64) -> None:
        (self.x, self.y), _ = vectors(count)
        self.how = how

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        if self.how == "dict":
            return {"x": x, "y": y}
        if self.how == "nested":
            return {"x": [x[:4], x[4:]]}, y
        if self.how == "numpy":
            return x.numpy(), int(y)
        if self.how == "noisy":
            return x + 0.1 * torch.randn(8), y
        if self.how == "numpy noise":
            return x + 0.1 * torch.from_numpy(np.random.randn(8).astype(np.float32)), y  # noqa: NPY002 - as augmentations do
        return x, y


def both(how: str) -> Any:
    return lambda: (Pairs(how), Pairs(how, 16))


def by_dict(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def by_nest(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(torch.cat(batch[0]["x"], 1)), batch[1])


def sorted_by_length(samples: list[Any]) -> Any:
    order = sorted(samples, key=lambda sample: float(sample[0][0]))
    return torch.stack([x for x, _ in order]), torch.stack([y for _, y in order])


def whole(samples: list[Any]) -> Any:
    return samples[0]


class Batches(Dataset[Any]):
    """Whole batches, each of 16 rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
        return x, (x[:, 0] > 0).long()


def loss_of_pair(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Bytes(nn.Module):
    """Takes numbers as they come."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind, self.embedding, self.head = kind, nn.Embedding(256, 4), nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == self.kind
        found: Tensor = self.head(self.embedding((tokens + 1).long()).flatten(1))
        return found


def tokens(kind: torch.dtype) -> Any:
    (x, y), _ = vectors()
    values = (40 * x.abs()).clamp(0, 100).to(kind)
    return (values, y), (values[:16], y[:16])


def with_a_negative_class() -> Any:
    (x, y), test = vectors()
    return (x, y - 1), test


def weighted() -> Any:
    data = Pairs("pair")
    return DataLoader(data, batch_size=8, sampler=WeightedRandomSampler([1.0] * 64, 64)), Pairs("pair", 16)


def split_at_random() -> Any:
    parts = random_split(Pairs("pair", 80), [64, 16], generator=torch.Generator().manual_seed(3))
    return parts[0], parts[1]


ZOO: dict[str, Idiom] = {
    "tensors": Idiom(net),
    "numpy arrays": Idiom(net, data=lambda: tuple(tuple(each.numpy() for each in pair) for pair in vectors())),
    "TensorDataset": Idiom(net, data=lambda: tuple(TensorDataset(*each) for each in vectors())),
    "Dataset of pairs": Idiom(net, data=both("pair")),
    "Dataset of numpy": Idiom(net, data=both("numpy")),
    "Dataset of dicts": Idiom(net, data=both("dict"), step=by_dict),
    "Dataset of nests": Idiom(net, data=both("nested"), step=by_nest),
    "augmentation by torch": Idiom(net, data=both("noisy")),
    "augmentation by numpy": Idiom(net, data=both("numpy noise")),
    "Subset": Idiom(net, data=lambda: (Subset(Pairs("pair", 80), range(0, 80, 2)), Pairs("pair", 16)), config={"epochs": 3}),
    "random_split": Idiom(net, data=split_at_random),
    "DataLoader": Idiom(net, data=lambda: tuple(DataLoader(Pairs("pair", n), batch_size=8) for n in (64, 16))),
    "collate_fn": Idiom(
        net, data=lambda: tuple(DataLoader(Pairs("pair", n), batch_size=8, collate_fn=sorted_by_length) for n in (64, 16))
    ),
    "whole batches": Idiom(
        net,
        data=lambda: tuple(DataLoader(Batches(n), batch_size=1, collate_fn=whole) for n in (20, 5)),
        step=loss_of_pair,
        config={"mu": 1},
    ),
    "a last batch of another size": Idiom(net, data=lambda: (vectors(60)[0], vectors()[1])),
    "no test data": Idiom(net, data=lambda: (vectors()[0], None)),
    "uint8": Idiom(lambda: Bytes(torch.uint8), data=lambda: tokens(torch.uint8)),
    "int32": Idiom(lambda: Bytes(torch.int32), data=lambda: tokens(torch.int32)),
    "int64": Idiom(lambda: Bytes(torch.int64), data=lambda: tokens(torch.int64)),
    "a negative class": Idiom(
        net, data=with_a_negative_class, refused="a target is -1, expected classes from 0, or -100", instead="-100"
    ),
    "a weighted sampler": Idiom(
        net,
        data=weighted,
        refused="to draw by weights, let a Dataset's __getitem__ draw the index",
        instead="a Dataset that draws its index by torch.multinomial",
    ),
}
