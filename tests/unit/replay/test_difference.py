"""Differences of two weight vectors: their number, size and place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mpisgd.replay.checks.difference import difference
from mpisgd.vectors.flat import FlatModel


@pytest.mark.parametrize(
    ("recomputed", "recorded", "elements", "largest", "place"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0, 0.0, -1),
        ([1.0, 2.5, 3.0], [1.0, 2.0, 3.25], 2, 0.5, 1),
        ([0.0, 2.0, 3.0], [-0.0, 2.0, 3.0], 1, 0.0, 0),
        ([math.nan, 2.0, 3.0], [math.nan, 2.0, 3.0], 0, 0.0, -1),
        ([math.nan, 2.0, 3.0], [1.0, 2.5, 3.0], 2, math.inf, 0),
        ([math.inf, 2.0, 3.0], [math.inf, 2.0, -math.inf], 1, math.inf, 2),
    ],
)
def test_differences(recomputed: list[float], recorded: list[float], elements: int, largest: float, place: int) -> None:
    model = FlatModel(nn.Linear(2, 1))
    one, other = torch.tensor(recomputed), torch.tensor(recorded)
    one.view(torch.int32)[one.isnan()] ^= 1  # another NaN
    found = difference("theta", one, other, torch.zeros(3), model, [(0, 2), (2, 3)])
    assert (found.elements, found.largest) == (elements, largest)
    assert found.within(0.0) == (elements == 0)
    assert found.place == place
    assert (found.shard, found.parameter) == {-1: (-1, ""), 0: (0, "weight"), 1: (0, "weight"), 2: (1, "bias")}[place]


def test_within_a_share_of_the_way_that_weights_went() -> None:
    model = FlatModel(nn.Linear(2, 1))
    moved = torch.tensor([1.0, 0.0, -4.0])
    found = difference("theta", moved + torch.tensor([0.0, 0.25, 0.0]), moved, torch.zeros(3), model, [(0, 3)])
    assert (found.moved, found.largest) == (4.0, 0.25)
    assert found.within(0.0625)
    assert not found.within(0.06)
