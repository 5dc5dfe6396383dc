"""The convolutional network of PyTorch's MNIST example, on smaller digits: log-softmax, nll_loss, StepLR by epochs; its Adadelta is
not here."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from tests.torch_law.law import Idiom


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        return functional.log_softmax(self.fc2(self.dropout2(functional.relu(self.fc1(x)))), dim=1)


def digits() -> Any:
    data = load_digits()
    images = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3) / 0.4
    targets = torch.tensor(data.target)
    return (images[:800], targets[:800]), (images[800:1000], targets[800:1000])


IDIOM = Idiom(
    Net,
    digits,
    functional.nll_loss,
    optimizer=lambda them: torch.optim.SGD(them, lr=0.05, momentum=0.9),
    schedule=lambda optimizer, steps: lr_scheduler.StepLR(optimizer, step_size=steps // 4, gamma=0.7),
    config={
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "alpha0": 0.05,
        "schedule": {"name": "StepLR", "kwargs": {"step_size": 50, "gamma": 0.7}},
        "mu": 16,
        "epochs": 4,
    },
)
