"""Small networks for inputs of any size: softmax regression, multi-layer perceptron, CNN."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.config import MlpOptions, SmallCnnOptions


def require(ok: bool, model: str, found: tuple[int, ...], expected: str) -> None:
    if not ok:
        raise ConfigError(f"model = {model!r}: inputs of shape {found}, expected {expected}")


def softmax(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(options: MlpOptions, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the perceptron; batch normalisation needs mu of at least 2."""
    widths = [math.prod(input_shape), *options.hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise(widths):
        layers.append(nn.Linear(width_in, width_out))
        if options.batch_norm:
            layers.append(nn.BatchNorm1d(width_out))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def small_cnn(options: SmallCnnOptions, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    require(len(input_shape) == 3 and min(input_shape[1:]) >= 2, "small_cnn", input_shape, "(channels, height >= 2, width >= 2)")
    channels, height, width = input_shape
    first, second = options.channels
    return nn.Sequential(
        nn.Conv2d(channels, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 2) * (width // 2), classes),
    )
