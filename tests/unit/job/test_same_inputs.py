"""Ranks with other data, another model or loss are named before the start: over a communicator of threads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd.data import as_dataset
from mpisgd.job.run.same_inputs import SAMPLES, Facts, Rough, of_data, of_loss, of_model, require_alike
from mpisgd.liveness.guard import AgreedError
from mpisgd.vectors.flat import FlatModel
from tests.unit.data.test_data_custom import Squares
from tests.unit.fakes import Threads


def numbers(samples: int = 30, seed: int = 0, shape: tuple[int, ...] = (4,)) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape, generator=generator), torch.arange(samples) % 3


def of(train: Any, test: Any = None) -> Facts:
    return of_data(as_dataset((train, test)), seed=1)


def model(seed: int = 0, change: Any = None) -> Facts:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if change is not None:
        change(module)
    return of_model(FlatModel(module))


def told(what: str, facts: list[Facts | None], root: int = 0) -> set[str]:
    comm = Threads(len(facts))
    ends = comm.everywhere(lambda rank: require_alike(comm, what, facts[rank], root))  # type: ignore[arg-type]
    assert {type(end) for end in ends} in ({AgreedError}, {type(None)})
    assert {getattr(end, "exit_status", 2) for end in ends} == {2}
    return {str(end) for end in ends if end is not None}


TRAIN = numbers()
OTHER_LABEL = TRAIN[0], (TRAIN[1] + 1) % 3

DATA = {
    "length": (of(numbers(29)), "training samples: 29 on rank 2, 30 on rank 1"),
    "test length": (of(TRAIN, numbers(3)), "test samples: 3 on rank 2, 0 on rank 1"),
    "draws": (of(numbers(seed=1)), r"inputs of training samples 0, .*29: values of norm"),
    "shape": (of(numbers(shape=(5,))), r"training inputs: torch.float32 \(5,\) on rank 2, torch.float32 \(4,\) on rank 1"),
    "classes": (of((TRAIN[0], TRAIN[1].float())), "classes: 1 on rank 2, 3 on rank 1"),
    "targets": (of(OTHER_LABEL), r"targets of training samples 0, .*29: crc32 \w+ on rank 2, crc32 \w+ on rank 1"),
    "a first sample": (of((torch.cat([TRAIN[0][:1] + 1, TRAIN[0][1:]]), TRAIN[1])), "inputs of training samples"),
    "a last sample": (of((torch.cat([TRAIN[0][:-1], TRAIN[0][-1:] + 1]), TRAIN[1])), "inputs of training samples"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_differ_are_named(name: str) -> None:
    facts, message = DATA[name]
    alike = of(TRAIN)
    (text,) = told("data", [None, alike, facts, alike], root=1)
    assert text.startswith("ConfigError: data: rank 2 has another than rank 1: ")
    assert re.search(message, text), text


def test_several_ranks_are_named() -> None:
    others = [of(numbers(seed=seed)) for seed in range(5)]
    (text,) = told("data", [None, *others], root=1)
    assert "; rank 3-5 also differ from rank 1; expected the same on every rank" in text


def test_the_same_data_are_alike_in_memory_or_fetched() -> None:
    assert not told("data", [None, *(of(numbers(), numbers(5)) for _ in range(2))], root=1)
    assert not told("data", [of(Squares(50), Squares(3)) for _ in range(2)])


def test_few_samples_are_fetched() -> None:
    train, test = Squares(1000), Squares(100)
    of(train, test)
    assert train.fetched <= SAMPLES + 1  # and one for its shape
    assert test.fetched <= SAMPLES + 1


def other_buffer(module: nn.Sequential) -> None:
    module[1].running_mean.add_(1)  # type: ignore[union-attr, operator]


def other_frozen(module: nn.Sequential) -> None:
    module[0].bias.requires_grad_(False).add_(0.01)  # type: ignore[union-attr, operator]


MODELS = {
    "draws": (model(1), model(), "initial 0.weight: values of norm"),
    "shape": (of_model(FlatModel(nn.Linear(4, 3))), model(), r"trainable parameters: 15 \(\w+\) on rank 1, 21 "),
    "buffer": (model(change=other_buffer), model(), "initial 1.running_mean"),
    "frozen": (
        model(change=lambda module: module[0].bias.requires_grad_(False)),
        model(change=other_frozen),
        "initial 0.bias",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_differ_are_named(name: str) -> None:
    other, alike, message = MODELS[name]
    (text,) = told("model", [alike, other])
    assert re.search(message, text), text


def test_last_bits_are_no_difference() -> None:
    """As another kind of CPU may compute them."""
    values = numbers(1000)[0]
    assert Rough.of(values).like(Rough.of(values * (1 + 1e-6)))
    assert not Rough.of(values).like(Rough.of(values * 1.01))
    assert Rough.of(torch.zeros(3)).like(Rough.of(torch.zeros(3)))
    assert not told("loss", [None, of_loss(2.3), of_loss(2.3001)], root=1)


def test_another_loss_is_named() -> None:
    (text,) = told("loss", [None, of_loss(2.3), of_loss(2.5)], root=1)
    assert "rank 2 has another than rank 1: loss of a first mini-batch: 2.5 on rank 2, 2.3 on rank 1" in text


class Graph(nn.Module):
    """Its adjacency is a sparse buffer."""

    def __init__(self, edges: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("adjacency", torch.eye(edges).to_sparse())


def test_sparse_buffers_are_looked_at() -> None:
    facts = [of_model(FlatModel(Graph(edges))) for edges in (5, 5, 6)]
    assert facts[0]["initial adjacency"] == "torch.sparse_coo of 5 elements" != facts[2]["initial adjacency"]
