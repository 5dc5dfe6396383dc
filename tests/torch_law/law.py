"""An idiom, the plain loop beside it, and the run of one learner that must have the loop's bits, or be refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from mpisgd.base.draws import seed_all, seeded, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import Config
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from tests.travel import configured

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: One learner, few mini-batches, nothing that torch's loop has not.
RUN: Mapping[str, Any] = {
    "protocol": "hardsync",
    "virtual": {"learners": 1},
    "mu": 8,
    "epochs": 2,
    "alpha0": 0.1,
    "threads": 1,
    "memory_format": "contiguous",
    "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    "log": {"progress": "off"},
    "evaluation": {"every_epochs": 0},
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def vectors(count: int = 64, size: int = 8) -> Any:
    """Points, and on which side of a plane each lies."""
    x = torch.randn(count, size, generator=torch.Generator().manual_seed(0))
    return (x, (x[:, 0] > 0).long()), (x[:16], (x[:16, 0] > 0).long())


@dataclass(frozen=True)
class Idiom:
    """A page of ordinary PyTorch.

    Attributes:
        loss, step: one of them; default: cross entropy.
        optimizer: what the loop has where `config` has others than the law's SGD.
        schedule: of an optimiser and the number of steps.
        refused: a part of what the user is told where the idiom does not go in.
        instead: what to write instead, for the page of the documentation.
    """

    model: Callable[..., nn.Module]
    data: Any = vectors
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[nn.Module, Any], Any] | None = None
    optimizer: Optimizer = sgd
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    instead: str = ""

    @property
    def user_objects(self) -> UserObjects:
        return UserObjects(model=self.model, data=self.data, loss=self.loss, step=self.step)

    def made(self, out: Path) -> Config:
        """The configuration of the run."""
        return configured({**RUN, **self.config, "out": str(out)})


@dataclass(frozen=True)
class Trained:
    """What a loop comes to."""

    state: dict[str, Any]
    losses: list[float]
    optimizer: dict[str, Tensor]
    """What it keeps of all trained parameters, as these lie in memory, one behind the other; zeros of those that it has never
    stepped."""


def _kept_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    states = [(each, optimizer.state.get(each, {})) for each in model.parameters() if each.requires_grad]
    names = {name for _, state in states for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name: torch.cat(
            [torch.zeros_like(each).add(state.get(name, 0.0)).as_strided((each.numel(),), (1,)) for each, state in states]
        )
        for name in names
    }


def _nobody(steps: int, model: nn.Module, loss_of: Any, data: Any) -> None:
    """Watch nothing."""


def plain_loop(idiom: Idiom, config: Config, learners: int = 1, watch: Callable[..., None] = _nobody) -> Trained:
    """The loop that a PyTorch programmer writes, over the mini-batches of learner 0; of several, over their mean gradient.

    `watch` is told of the initial weights, and after each step: the steps made, the model, a loss of model and batch, the test
    data.
    """
    torch.set_num_threads(config.threads)
    data = parts.load_data(config, idiom.user_objects)
    meta = parts.meta_of(data)
    with seeded(seeds_of(Domain.DATA, config.seed)):
        train = idiom.data()[0]
    sampling = parts.make_sampling(config, meta, learners)
    model = parts.make_module(config, meta, idiom.user_objects)
    models = [model, *(copy.deepcopy(model) for _ in range(learners - 1))]
    """Each learner has buffers of its own."""
    optimizer = idiom.optimizer(model.parameters())
    steps = int(np.ceil(config.epochs * meta.train_samples / (config.mu * learners)))
    scheduler = None if idiom.schedule is None else idiom.schedule(optimizer, steps)
    criterion = idiom.loss or nn.functional.cross_entropy

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        if idiom.step is not None:
            returned = idiom.step(model, batch)
            loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
            return loss
        inputs, targets = batch
        return criterion(model(inputs), targets)

    losses = []
    for each in models:
        each.train()
    watch(0, model, loss_of, data.test)
    for seq in range(steps):
        means: dict[str, Tensor] = {}
        for learner, own in enumerate(models):
            for parameter, newest in zip(own.parameters(), model.parameters(), strict=True):
                if parameter.requires_grad:
                    parameter.data.copy_(newest.data)
            indices = sampling.indices(learner, seq)
            with seeded(seeds_of(Domain.SAMPLES, config.seed, learner, seq)):
                batch = data.train.batch(indices) if data.train.in_order else batch_of(train, indices.tolist())
            seed_all(seeds_of(Domain.DROPOUT, config.seed, learner, seq))
            own.zero_grad()
            loss = loss_of(own, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            for name, parameter in own.named_parameters():
                if parameter.grad is not None:
                    means[name] = means[name] + parameter.grad if name in means else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = means[name] / learners if name in means else None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        watch(seq + 1, model, loss_of, data.test)
    return Trained(model.state_dict(), losses, _kept_of(optimizer, model))


def batch_of(train: Any, indices: list[int]) -> Any:
    """As torch's own DataLoader makes it."""
    if isinstance(train, tuple | list):
        return tuple(torch.as_tensor(each)[indices] for each in train)
    dataset, collate = (train.dataset, train.collate_fn) if isinstance(train, DataLoader) else (train, default_collate)
    several = getattr(dataset, "__getitems__", None)
    return collate([dataset[index] for index in indices] if several is None else several(indices))


def loss_on_test_data(model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], data: Any) -> float:
    """As a torch loop evaluates, on all samples at once."""
    model.eval()
    with torch.no_grad():
        found = loss_of(model, data.batch(np.arange(len(data)))).item()
    model.train()
    return found
