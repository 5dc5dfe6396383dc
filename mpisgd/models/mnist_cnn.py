"""The MNIST network of [Chen16 A.1]: four layers of 3x3 filters, "with max-pooling and weight normalization in every layer".

Chosen here, not there: 16, 32, 64 and 128 filters, padding 1, ReLU, pooling 2x2 (28 -> 14 -> 7 -> 3 -> 1), torch's default
initialisation (weight normalisation starts at g = |v|), a weight-normalised linear read-out.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from mpisgd.models.small import require

_FILTERS = (16, 32, 64, 128)


def make(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    require(len(input_shape) == 3 and input_shape[1:] == (28, 28), "mnist_cnn", input_shape, "(channels, 28, 28)")
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise((input_shape[0], *_FILTERS)):
        layers += [weight_norm(nn.Conv2d(channels_in, channels_out, 3, padding=1)), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), weight_norm(nn.Linear(_FILTERS[-1], classes)))
