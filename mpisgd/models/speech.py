"""The acoustic model of [Dean12 5], split by columns and rows."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from mpisgd.config import SpeechOptions
from mpisgd.models.partition import Partition


class Columns(nn.Module):
    """A Linear split by outputs: no communication."""

    def __init__(self, partition: Partition, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, len(partition.share(outputs)))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output


class Rows(nn.Module):
    """A Linear split by inputs; all pieces get its output."""

    def __init__(self, partition: Partition, inputs: int, outputs: int) -> None:
        super().__init__()
        own = len(partition.share(inputs))
        self.partition = partition
        self.layer = nn.Linear(own, outputs, bias=partition.place == 0)
        with torch.no_grad():  # scaled for the inputs of the whole layer
            for parameter in self.layer.parameters():
                parameter.mul_(math.sqrt(own / inputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.partition.sum(self.layer(inputs))


class Speech(nn.Module):
    """Pairs of layers, by columns, then by rows: one sum per pair; a leftover layer is gathered."""

    def __init__(self, options: SpeechOptions, inputs: int, classes: int, partition: Partition) -> None:
        super().__init__()
        widths = [inputs, *options.hidden, classes]
        self.partition = partition
        self.layers = nn.ModuleList(
            (Rows if at % 2 else Columns)(partition, widths[at], widths[at + 1]) for at in range(len(widths) - 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        passed = inputs.flatten(1)
        for at, layer in enumerate(self.layers):
            passed = layer(passed if at == 0 else torch.sigmoid(passed))
        return passed if len(self.layers) % 2 == 0 else self.partition.gather(passed)


def make(options: SpeechOptions, input_shape: tuple[int, ...], classes: int, partition: Partition) -> nn.Module:
    """Return the network; a whole one can be cut into stages."""
    if partition.places == 1:
        widths = [math.prod(input_shape), *options.hidden]
        hidden = [(nn.Linear(before, after), nn.Sigmoid()) for before, after in itertools.pairwise(widths)]
        return nn.Sequential(nn.Flatten(), *itertools.chain(*hidden), nn.Linear(widths[-1], classes))
    return Speech(options, math.prod(input_shape), classes, partition)
