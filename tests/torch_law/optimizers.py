"""Optimisers and learning-rate schedulers of torch.optim, on a linear model whose head no loss uses now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.torch_law.law import Idiom, Optimizer


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def made(name: str, torchs: Optimizer, **options: Any) -> Idiom:
    return Idiom(net, optimizer=torchs, config={"optimizer": {"name": name, **options}})


def scheduled(name: str, scheduler: Callable[[torch.optim.Optimizer, int], Any], **kwargs: Any) -> Idiom:
    return Idiom(net, schedule=scheduler, config={"schedule": {"name": name, "kwargs": kwargs}})


ZOO: dict[str, Idiom] = {
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
}
