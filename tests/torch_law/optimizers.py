"""Optimisers and learning-rate schedulers of torch.optim; each optimiser, too, where parameters have no gradient now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.torch_law.law import Idiom, Optimizer


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Heads(nn.Module):
    """A body and heads: the first of all batches, one that most batches do not use, and one that none does."""

    def __init__(self, rarely: float = 0.3) -> None:
        super().__init__()
        self.never, self.body, self.seldom, self.head = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.rarely = rarely

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        found: Tensor = self.head(hidden)
        return found + self.seldom(hidden) if float(x[0, 0]) > self.rarely else found


def unused(name: str, torchs: Optimizer, **options: Any) -> Idiom:
    return Idiom(Heads, optimizer=torchs, config={"optimizer": {"name": name, **options}})


def made(name: str, torchs: Optimizer, **options: Any) -> Idiom:
    return Idiom(net, optimizer=torchs, config={"optimizer": {"name": name, **options}})


def scheduled(name: str, scheduler: Callable[[torch.optim.Optimizer, int], Any], **kwargs: Any) -> Idiom:
    return Idiom(net, schedule=scheduler, config={"schedule": {"name": name, "kwargs": kwargs}})


ZOO: dict[str, Idiom] = {
    "unused parameters, SGD": unused("sgd", lambda them: torch.optim.SGD(them, lr=0.1)),
    "unused parameters, weight decay": unused("sgd", lambda them: torch.optim.SGD(them, 0.1, weight_decay=0.1), weight_decay=0.1),
    "unused parameters, momentum": unused("sgd", lambda them: torch.optim.SGD(them, 0.1, momentum=0.9), momentum=0.9),
    "unused parameters, Nesterov momentum": unused(
        "sgd", lambda them: torch.optim.SGD(them, 0.1, momentum=0.9, nesterov=True), momentum=0.9, nesterov=True
    ),
    "unused parameters, Adagrad": unused(
        "adagrad", lambda them: torch.optim.Adagrad(them, 0.1, weight_decay=0.1), weight_decay=0.1
    ),
    "unused parameters, RMSprop": unused("rmsprop", lambda them: torch.optim.RMSprop(them, 0.1, momentum=0.5), momentum=0.5),
    "unused parameters, Adam": unused("adam", lambda them: torch.optim.Adam(them, 0.1)),
    "unused parameters, AdamW": unused("adamw", lambda them: torch.optim.AdamW(them, 0.1)),
    "Adagrad": made("adagrad", lambda them: torch.optim.Adagrad(them, 0.1)),
    "RMSprop": made("rmsprop", lambda them: torch.optim.RMSprop(them, 0.1)),
    "Adam": made("adam", lambda them: torch.optim.Adam(them, 0.1)),
    "AdamW": made("adamw", lambda them: torch.optim.AdamW(them, 0.1)),
    "SGD": made("sgd", lambda them: torch.optim.SGD(them, lr=0.1)),
    "SGD with momentum": made("sgd", lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.8), momentum=0.8),
    "SGD with Nesterov momentum": made(
        "sgd", lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.8, nesterov=True), momentum=0.8, nesterov=True
    ),
    "SGD with weight decay": made("sgd", lambda them: torch.optim.SGD(them, lr=0.1, weight_decay=0.1), weight_decay=0.1),
    "ExponentialLR": scheduled("ExponentialLR", lambda them, _: lr_scheduler.ExponentialLR(them, 0.9), gamma=0.9),
    "StepLR": scheduled("StepLR", lambda them, _: lr_scheduler.StepLR(them, 3, 0.5), step_size=3, gamma=0.5),
    "MultiStepLR": scheduled(
        "MultiStepLR", lambda them, _: lr_scheduler.MultiStepLR(them, [2, 7], 0.5), milestones=[2, 7], gamma=0.5
    ),
    "OneCycleLR": scheduled("OneCycleLR", lambda them, steps: lr_scheduler.OneCycleLR(them, 0.1, steps)),
    "OneCycleLR without momentum": scheduled(
        "OneCycleLR", lambda them, steps: lr_scheduler.OneCycleLR(them, 0.1, steps, cycle_momentum=False), cycle_momentum=False
    ),
    "CyclicLR": scheduled(
        "CyclicLR", lambda them, _: lr_scheduler.CyclicLR(them, 0.01, 0.1, 3), base_lr=0.1, max_lr=1.0, step_size_up=3
    ),
    "ConstantLR": scheduled(
        "ConstantLR", lambda them, _: lr_scheduler.ConstantLR(them, 0.5, total_iters=4), factor=0.5, total_iters=4
    ),
    "LinearLR": scheduled(
        "LinearLR", lambda them, _: lr_scheduler.LinearLR(them, 0.2, total_iters=6), start_factor=0.2, total_iters=6
    ),
    "PolynomialLR": scheduled(
        "PolynomialLR", lambda them, _: lr_scheduler.PolynomialLR(them, total_iters=9, power=2.0), total_iters=9, power=2.0
    ),
    "CosineAnnealingLR": scheduled(
        "CosineAnnealingLR", lambda them, _: lr_scheduler.CosineAnnealingLR(them, 8, 0.01), T_max=8, eta_min=0.1
    ),
    "CosineAnnealingWarmRestarts": scheduled(
        "CosineAnnealingWarmRestarts", lambda them, _: lr_scheduler.CosineAnnealingWarmRestarts(them, 4), T_0=4
    ),
    **{
        name: Idiom(
            net,
            config={"optimizer": name.lower()},
            refused=f"optimizer = {name.lower()!r} is unknown: it is not here",
            instead="sgd, adagrad, rmsprop, adam, adamw, lars or lamb",
        )
        for name in ("Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "Rprop", "SparseAdam")
    },
    **{
        name: Idiom(
            net,
            config={"schedule": name},
            refused=f"schedule = {name!r} is unknown: {why}",
            instead="a function of the epoch, package.module:function",
        )
        for name, why in {
            "LambdaLR": "bring your own function",
            "MultiplicativeLR": "bring your own function",
            "SequentialLR": "the scheduler takes objects; bring your own function",
            "ChainedScheduler": "the scheduler takes objects; bring your own function",
            "ReduceLROnPlateau": "shards see no metric, and wait for no metric",
        }.items()
    },
}
