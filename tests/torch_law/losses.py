"""Losses: of torch.nn and torch.nn.functional, weighted, summed, with targets that are ignored, with parameters of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.torch_law.law import Idiom, vectors


def net(out: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, out))


def with_ignored() -> Any:
    (x, y), test = vectors()
    y = y.clone()
    y[::5] = -100
    return _samples(x, y), test


def with_others_ignored() -> Any:
    (x, y), test = vectors()
    y = y.clone()
    y[::5] = 7
    return _samples(x, y), test


class _Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def _samples(x: Tensor, y: Tensor) -> _Samples:
    return _Samples(x, y)


def numbers(columns: int = 2, positive: bool = False) -> Any:
    (x, _), _ = vectors()
    y = x[:, :columns].abs() if positive else x[:, :columns]
    return (x, y), (x[:16], y[:16])


class Center(nn.Module):
    """A loss with centres of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(2, 2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, self.centres[target])


CENTER = Center()


def by_centres(output: Tensor, target: Tensor) -> Tensor:
    found: Tensor = CENTER(output, target)
    return found


class WithItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss = net(), Center()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def step_with_its_loss(model: Any, batch: Any) -> Tensor:
    found: Tensor = model.loss(model(batch[0]), batch[1])
    return found


def _ones() -> Any:
    (x, y), _ = vectors()
    y = y.float().unsqueeze(1)
    return (x, y), (x[:16], y[:16])


def _signs() -> Any:
    (x, y), _ = _ones()
    return (x, 2 * y - 1), (x[:16], 2 * y[:16] - 1)


def _shares() -> Any:
    (x, _), _ = vectors()
    y = x[:, :2].softmax(1)
    return (x, y), (x[:16], y[:16])


def _by_step(criterion: Any) -> Any:
    """Of the outputs for halves of the samples, and a target made of both."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        half = len(x) // 2
        one, two = model(x[:half]), model(x[half : 2 * half])
        found: Tensor = criterion(one, two, 2.0 * (y[:half] == y[half : 2 * half]) - 1)
        return found

    return step


def _triplet(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    found: Tensor = nn.TripletMarginLoss()(output, output.roll(1, 0).detach(), output.roll(2, 0))
    return found


def _alignment(model: nn.Module, batch: Any) -> Tensor:
    """Four steps of time with three letters each."""
    times = model(batch[0]).view(-1, 4, 3).log_softmax(2).transpose(0, 1)
    lengths = torch.full((times.shape[1],), 4), torch.full((times.shape[1],), 1)
    found: Tensor = nn.CTCLoss()(times, 1 + batch[1].unsqueeze(1), *lengths)
    return found


def _gaussian(output: Tensor, target: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(output[:, :2], target, output[:, 2:].exp())


def _labels() -> Any:
    (x, _), _ = vectors()
    y = (x[:, :3] > 0).float()
    return (x, y), (x[:16], y[:16])


ZOO: dict[str, Idiom] = {
    "GaussianNLLLoss": Idiom(lambda: net(4), data=numbers, loss=_gaussian),
    "MultiLabelSoftMarginLoss": Idiom(lambda: net(3), data=_labels, loss=nn.MultiLabelSoftMarginLoss()),
    "HingeEmbeddingLoss": Idiom(lambda: net(1), data=_signs, loss=nn.HingeEmbeddingLoss()),
    "CosineEmbeddingLoss": Idiom(net, step=_by_step(nn.CosineEmbeddingLoss(margin=0.1))),
    "MarginRankingLoss": Idiom(lambda: nn.Sequential(net(1), nn.Flatten(0)), step=_by_step(nn.MarginRankingLoss(margin=0.1))),
    "TripletMarginLoss": Idiom(net, step=_triplet),
    "CTCLoss": Idiom(lambda: net(12), step=_alignment),
    "AdaptiveLogSoftmaxWithLoss": Idiom(
        net,
        loss=nn.AdaptiveLogSoftmaxWithLoss(2, 2, [1]),
        refused="AdaptiveLogSoftmaxWithLoss has parameters outside the model",
        instead="a model that has the loss, and a step that calls both",
    ),
    "CrossEntropyLoss": Idiom(net, loss=nn.CrossEntropyLoss()),
    "CrossEntropyLoss with weights": Idiom(net, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))),
    "CrossEntropyLoss with label smoothing": Idiom(net, loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "CrossEntropyLoss summed": Idiom(net, loss=nn.CrossEntropyLoss(reduction="sum"), config={"alpha0": 0.1}),
    "cross_entropy of ignored targets": Idiom(net, data=with_ignored),
    "CrossEntropyLoss(ignore_index=7)": Idiom(net, data=with_others_ignored, loss=nn.CrossEntropyLoss(ignore_index=7)),
    "partial(cross_entropy, ignore_index=7)": Idiom(
        net, data=with_others_ignored, loss=partial(functional.cross_entropy, ignore_index=7)
    ),
    "NLLLoss": Idiom(lambda: nn.Sequential(net(), nn.LogSoftmax(dim=1)), loss=nn.NLLLoss()),
    "MSELoss": Idiom(net, data=numbers, loss=nn.MSELoss()),
    "L1Loss": Idiom(net, data=numbers, loss=nn.L1Loss()),
    "SmoothL1Loss": Idiom(net, data=numbers, loss=nn.SmoothL1Loss()),
    "HuberLoss": Idiom(net, data=numbers, loss=nn.HuberLoss()),
    "PoissonNLLLoss": Idiom(net, data=lambda: numbers(positive=True), loss=nn.PoissonNLLLoss()),
    "BCEWithLogitsLoss": Idiom(lambda: net(1), data=_ones, loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))),
    "BCELoss": Idiom(lambda: nn.Sequential(net(1), nn.Sigmoid()), data=_ones, loss=nn.BCELoss()),
    "KLDivLoss": Idiom(lambda: nn.Sequential(net(), nn.LogSoftmax(dim=1)), data=_shares, loss=nn.KLDivLoss(reduction="batchmean")),
    "MultiMarginLoss": Idiom(net, loss=nn.MultiMarginLoss()),
    "SoftMarginLoss": Idiom(lambda: net(1), data=_signs, loss=nn.SoftMarginLoss()),
    "a lambda": Idiom(net, loss=lambda output, target: functional.cross_entropy(output, target) + 0.01 * output.square().mean()),
    "a loss with parameters": Idiom(
        net,
        loss=CENTER,
        refused="Center has parameters outside the model (centres), never trained",
        instead="a model that has the loss, and a step that calls both",
    ),
    "a closure over parameters": Idiom(
        net,
        loss=by_centres,
        refused="depends on parameters outside the model",
        instead="a model that has the loss, and a step that calls both",
    ),
    "a model that has its loss": Idiom(WithItsLoss, step=step_with_its_loss),
    "the class of a loss": Idiom(
        net,
        loss=nn.CrossEntropyLoss,  # type: ignore[arg-type]
        refused="found the class CrossEntropyLoss, expected a callable of (output, target): CrossEntropyLoss()",
        instead="nn.CrossEntropyLoss()",
    ),
}
