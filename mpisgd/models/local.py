"""Locally connected images [Dean12 3, 5]: each place has its own weights; pieces of columns need their neighbours' borders."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpisgd.config import LocalOptions
from mpisgd.models.partition import Partition
from mpisgd.models.small import require


class Local(nn.Module):
    """A layer of images as large as its inputs, zero-padded; each piece has some columns.

    weight: (rows, own columns, outputs, inputs, field^2), bias: (outputs, rows, own columns).
    """

    def __init__(self, partition: Partition, size: tuple[int, int], inputs: int, outputs: int, field: int) -> None:
        super().__init__()
        rows, columns = size
        own = len(partition.share(columns))
        self.partition = partition
        self.field = field
        bound = 1 / math.sqrt(inputs * field**2)  # as torch initialises convolutions
        self.weight = nn.Parameter(torch.empty(rows, own, outputs, inputs, field**2).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs, rows, own).uniform_(-bound, bound))

    def forward(self, images: Tensor) -> Tensor:
        return self.of(self.partition.exchange(images, self.field // 2))

    def of(self, wide: Tensor) -> Tensor:
        """Compute own columns of `wide`, which has the borders."""
        rows, own = self.weight.shape[:2]
        halo = self.field // 2
        taps = functional.unfold(wide, self.field, padding=(halo, 0)).view(len(wide), -1, rows, own)
        return torch.einsum("nkrc,rcok->norc", taps, self.weight.flatten(3)) + self.bias


class LocalImages(nn.Module):
    """Locally connected layers with ReLU, then a fully connected layer by rows: one sum in all."""

    def __init__(self, options: LocalOptions, input_shape: tuple[int, ...], classes: int, partition: Partition) -> None:
        super().__init__()
        channels, rows, columns = input_shape
        self.own, self.halo = partition.share(columns), options.field // 2
        self.partition = partition
        widths = [channels, *options.channels]
        self.layers = nn.ModuleList(
            Local(partition, (rows, columns), widths[at], widths[at + 1], options.field) for at in range(len(widths) - 1)
        )
        self.last = nn.Linear(widths[-1] * rows * len(self.own), classes, bias=partition.place == 0)

    def forward(self, images: Tensor) -> Tensor:
        halo, layers = self.halo, list[Any](self.layers)
        wide = functional.pad(images, (halo, halo))[..., self.own.start : self.own.stop + 2 * halo]  # every piece has whole images
        passed = torch.relu(layers[0].of(wide))
        for layer in layers[1:]:
            passed = torch.relu(layer(passed))
        return self.partition.sum(self.last(passed.flatten(1)))


def make(options: LocalOptions, input_shape: tuple[int, ...], classes: int, partition: Partition) -> nn.Module:
    """Return the network; a whole one can be cut into stages."""
    require(len(input_shape) == 3, "local", input_shape, "(channels, height, width)")
    if partition.places == 1:
        whole = LocalImages(options, input_shape, classes, partition)
        layers = itertools.chain(*((layer, nn.ReLU()) for layer in whole.layers))
        return nn.Sequential(*layers, nn.Flatten(), whole.last)
    return LocalImages(options, input_shape, classes, partition)
