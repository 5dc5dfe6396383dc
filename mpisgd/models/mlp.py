"""Multi-layer perceptron with ReLU."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from mpisgd.config import MlpOptions


def make(options: MlpOptions, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Inputs of any shape, flattened; batch normalisation, where chosen, before each ReLU (it needs mu of at least 2)."""
    widths = [math.prod(input_shape), *options.hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise(widths):
        layers.append(nn.Linear(width_in, width_out))
        if options.batch_norm:
            layers.append(nn.BatchNorm1d(width_out))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
