"""Caffe's cifar10_full, which [Zhang16 4.1] follows: three convolutions, each followed by pooling, then one linear layer.

Left out: Caffe's local response normalisation (it has no parameters, and [Zhang16] does not mention it) and the doubled
learning rate of biases. The initialisation is torch's default, not Caffe's (normal of deviation 0.0001, 0.01, 0.01, 0.01;
zero biases), which is made for pixels of 0 to 255 and does not start on inputs of 0 to 1: after 400 mini-batches of 64 at
learning rate 0.01 and momentum 0.9 the loss was 2.30 with Caffe's, 2.04 with its first layer times 255, 1.62 with torch's.
"""

from __future__ import annotations

from torch import nn

from mpisgd.models.small import require


def make(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Images (3, 32, 32); 89,578 parameters for 10 classes."""
    require(input_shape == (3, 32, 32), "cifar10_full", input_shape, "(3, 32, 32)")
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, classes),
    )
