"""Two 3x3 convolutions and one fully connected layer, for tiny images such as the 8x8 digits."""

from __future__ import annotations

from torch import nn

from mpisgd.config import SmallCnnOptions
from mpisgd.models.shapes import require


def make(options: SmallCnnOptions, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Images (channels, height, width) of at least 2x2 pixels; one 2x2 max pooling after the second convolution."""
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
