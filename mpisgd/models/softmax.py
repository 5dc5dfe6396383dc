"""Softmax regression: one fully connected layer."""

from __future__ import annotations

import math

from torch import nn


def make(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Inputs of any shape, flattened."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
