"""One model with batch norm and a skip connection, written in each way in which a model is cut: the same modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Passed = tuple[Tensor, Tensor]


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 16), nn.BatchNorm1d(16)

    def forward(self, images: Tensor) -> Passed:
        output: Tensor = self.norm(self.layer(images.flatten(1))).relu()
        return output, output


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, passed: Passed) -> Passed:
        inputs, first = passed
        return self.norm(self.layer(inputs)).relu(), first


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, passed: Passed) -> Tensor:
        output: Tensor = self.layer(passed[0] + passed[1])
        return output


def sequential() -> nn.Module:
    """Cut by itself, between its children."""
    return nn.Sequential(Begin(), Middle(), Middle(), End())


def listed() -> list[nn.Module]:
    """A list of stages."""
    return [Begin(), Middle(), Middle(), End()]


class Whole(nn.Module):
    """Any module, cut by the names of its modules: its parameters are in another order than it uses them, and its skip connection
    passes over a stage."""

    def __init__(self) -> None:
        super().__init__()
        begin, blocks, end = Begin(), [Middle(), Middle()], End()
        self.end, self.blocks, self.begin = end, nn.ModuleList(blocks), begin

    def forward(self, images: Tensor) -> Tensor:
        passed = self.begin(images)
        for block in self.blocks:
            passed = block(passed)
        output: Tensor = self.end(passed)
        return output


def whole() -> nn.Module:
    return Whole()


def in_order() -> nn.Module:
    """The same, its parameters in the order of use: so the flat vector has them, however it is cut."""
    model = Whole()
    begin, blocks, end = model.begin, model.blocks, model.end
    del model.begin, model.blocks, model.end
    model.begin, model.blocks, model.end = begin, blocks, end
    return model


AT = {2: ("blocks.1",), 3: ("blocks.0", "blocks.1"), 4: ("blocks.0", "blocks.1", "end")}
"""Of `whole`, where so many stages begin."""


class Fickle(nn.Module):
    """What its pass does depends on values: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        passed = self.first(images.flatten(1))
        output: Tensor = self.second(passed if float(passed.sum()) > 0 else -passed)
        return output


def state_of(path: Any) -> dict[str, bytes]:
    """The last weights of a run, by bits, under the names of `whole`."""
    state = torch.load(path, weights_only=True)["theta"]
    names = {"0.": "begin.", "1.": "blocks.0.", "2.": "blocks.1.", "3.": "end."}
    return {names.get(name[:2], name[:2]) + name[2:]: each.numpy().tobytes() for name, each in state.items()}


def misfits() -> list[Callable[[], nn.Module]]:
    """A list of factories, whose pieces do not fit each other."""
    return [lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), lambda: nn.Linear(6, 10)]
