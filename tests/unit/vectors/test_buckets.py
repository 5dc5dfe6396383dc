"""Where buckets are cut, and when a gradient tells of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpisgd.gradient.by_layers.parts import GradientInParts
from mpisgd.vectors import buckets as module
from mpisgd.vectors.buckets import Bucket, buckets
from mpisgd.vectors.flat import FlatModel, Layer, slice_bounds
from tests.unit.gradient.test_layerwise import Batch, Shards


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 6), st.integers(1, 200))
def test_they_are_the_slices_cut_none_too_large_or_too_small_but_the_first(sizes: list[int], shards: int, nbytes: int) -> None:
    layers = [Layer(str(number), size) for number, size in enumerate(sizes)]
    size = sum(sizes)
    slices = slice_bounds(size, min(shards, size))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BUCKET_NBYTES", nbytes)
        found = buckets(layers, slices)
    begins = [0, *itertools.accumulate(sizes)]
    assert [bucket.start for bucket in found] == [0, *(bucket.end for bucket in found[:-1])]
    assert found[-1].end == size
    for bucket in found:
        start, end = slices[bucket.owner]
        assert start <= bucket.start < bucket.end <= end
        held = bucket.end - bucket.start
        assert held < 2 * max(1, nbytes // 4)
        assert bucket.start == start or held >= nbytes // 4
        cuts_a_layer = bucket.start not in (start, *begins)
        assert held == max(1, nbytes // 4) or not cuts_a_layer, "a layer is cut only where it is too large"
        assert begins[bucket.first] <= bucket.start < begins[bucket.first + 1]


def test_a_layer_larger_than_a_bucket_is_several() -> None:
    large = 2**22
    layers = [Layer("a", large), Layer("b", 2**19), Layer("c", 2**19), Layer("d", 2**19)]
    found = buckets(layers, [(0, large // 2), (large // 2, large + 3 * 2**19)], nbytes=2**22)
    assert found == [
        Bucket(0, 0, 2**20, 0),
        Bucket(0, 2**20, 2**21, 0),
        Bucket(1, 2**21, 2**21 + 3 * 2**19, 0),
        Bucket(1, 2**21 + 3 * 2**19, 2**22 + 2**19, 0),
        Bucket(1, large + 2**19, large + 3 * 2**19, 2),
    ]


class Ones(Batch):
    """Both passes over ones, whose gradients are 0 nowhere but in layers that have no part in the output."""

    def compute(self, seq: int) -> float:
        self.forward(seq).backward()  # type: ignore[no-untyped-call]
        return 1.0

    def forward(self, seq: int) -> torch.Tensor:
        return self.model.module(torch.ones(2, 4)).square().sum()  # type: ignore[no-any-return]


class Partly(nn.Sequential):
    """Its last layer has no part in the output."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:-1]:
            inputs = layer(inputs)
        return inputs


def left(network: nn.Module, *, held: bool = False, own: int = -1) -> list[tuple[int, bool]]:
    """The buckets that are left in a mini-batch, in turn, and whether a gradient was there."""
    torch.manual_seed(1)
    model = FlatModel(network)
    cut = buckets(model.layers, slice_bounds(model.size, 2), nbytes=80)
    bounds = [(bucket.start, bucket.end) for bucket in cut]
    exchange, batch = Shards(model, bounds), Ones(model)
    mine = [number for number, bucket in enumerate(cut) if bucket.owner == own]
    gradient = GradientInParts(batch, batch, model, bounds, exchange, held=held, own=mine)  # type: ignore[arg-type]
    for seq in range(2):
        exchange.take_back()
        gradient.prepare(seq)
        gradient.compute(seq)
    assert sorted(number for what, number in exchange.told if what == "need") == list(range(len(cut)))
    numbers = [number for what, number in exchange.told if what == "leave"]
    assert sorted(numbers) == list(range(len(cut))), "each once"
    return [(number, bool(exchange.gradients[slice(*bounds[number])].any())) for number in numbers]


def linear(number: int) -> list[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(number)]


def test_each_bucket_is_told_once_as_soon_as_its_gradient_is_there() -> None:
    assert left(nn.Sequential(*linear(4))) == [(3, True), (2, True), (1, True), (0, True)]


def test_own_buckets_are_left_when_all_others_are() -> None:
    assert left(nn.Sequential(*linear(4)), own=1) == [(1, True), (0, True), (3, True), (2, True)]


def test_what_the_backward_pass_never_comes_to_is_told_at_its_end() -> None:
    assert left(Partly(*linear(4))) == [(2, True), (1, True), (0, True), (3, False)]


def test_a_layer_that_is_used_twice_is_there_once() -> None:
    shared, between, last = linear(3)
    assert all(there for _, there in left(nn.Sequential(shared, between, shared, last)))


def test_held_all_are_told_after_the_last_pass() -> None:
    assert left(nn.Sequential(*linear(2)), held=True) == [(1, True), (0, True)]
