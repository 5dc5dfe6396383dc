"""Caffe's cifar10_full, used by [Zhang16 4.1].

plain    inputs of 0 to 1, torch's first weights, no normalisation
caffe    as Caffe's files: pixels of 0 to 255 (`data.scale = 1`), first weights normal with deviations 0.0001, 0.01, 0.01, 0.01,
         biases 0, response normalisation within channels after the first two poolings: alpha0 = 0.001 means the paper's.
         `jobs/zhang16-cifar10.toml` has Caffe's rates and weight decays per parameter.

Caffe's first weights fail on inputs of 0 to 1 (loss after 400 mini-batches: 2.30; torch's: 1.62).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from mpisgd.config import Cifar10FullOptions
from mpisgd.models.small import require

_DEVIATIONS = {"conv1": 0.0001, "conv2": 0.01, "conv3": 0.01, "ip1": 0.01}


def make(options: Cifar10FullOptions, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network; 89,578 parameters for 10 classes."""
    require(input_shape == (3, 32, 32), "cifar10_full", input_shape, "(3, 32, 32)")
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(3, 32, 5, padding=2),
        pool1=nn.MaxPool2d(3, stride=2, ceil_mode=True),
        relu1=nn.ReLU(),
        norm1=WithinChannels(),
        conv2=nn.Conv2d(32, 32, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.AvgPool2d(3, stride=2, ceil_mode=True),
        norm2=WithinChannels(),
        conv3=nn.Conv2d(32, 64, 5, padding=2),
        relu3=nn.ReLU(),
        pool3=nn.AvgPool2d(3, stride=2, ceil_mode=True),
        flatten=nn.Flatten(),
        ip1=nn.Linear(64 * 4 * 4, classes),
    )
    if options.form == "plain":
        return nn.Sequential(*(layer for layer in layers.values() if not isinstance(layer, WithinChannels)))
    model = nn.Sequential(layers)
    for name, deviation in _DEVIATIONS.items():
        layer = model.get_submodule(name)
        nn.init.normal_(layer.weight, std=deviation)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


class WithinChannels(nn.Module):
    """Caffe's response normalisation: x / (1 + 5e-5 m)^0.75, m the mean of x^2 over 3 x 3 places, zeros outside."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.rsqrt(1 + 5e-5 * avg_pool2d(x.square(), 3, stride=1, padding=1))
        return x * root * root.sqrt()
