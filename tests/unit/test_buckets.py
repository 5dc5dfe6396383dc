"""Where buckets are cut, and when a gradient tells of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.gradient.by_layers.buckets import BucketedGradient
from mpisgd.vectors import buckets as module
from mpisgd.vectors.buckets import Bucket, buckets
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, Layer, slice_bounds
from tests.effort import spread
from tests.unit.test_layerwise import KINDS, Batch, Net, Shards, seeded


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


class Heard:
    """Notes which bucket is left, and whether its gradient was there."""

    def __init__(self, model: FlatModel, cut: Sequence[Bucket]) -> None:
        self.model, self.cut = model, cut
        self.left: list[tuple[int, bool]] = []

    def need(self, shard: int) -> None: ...

    def leave(self, shard: int, *_: Any) -> None:
        bucket = self.cut[shard]
        self.left.append((shard, bool(self.model.gradients[bucket.start : bucket.end].any())))


class Passes(Travels):
    """Both passes over ones."""

    samples = 1

    def __init__(self, model: FlatModel, passes: int = 1) -> None:
        self.model, self.passes = model, passes
        self.memory = model.memory

    def forward(self, seq: int) -> torch.Tensor:
        return self.model.module(torch.ones(2, 4))  # type: ignore[no-any-return]

    def compute(self, seq: int) -> float:
        self.model.zero_gradients()
        for _ in range(self.passes):
            self.forward(seq).square().sum().backward()
        return 1.0


class Partly(nn.Sequential):
    """Its last layer has no part in the output."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:-1]:
            inputs = layer(inputs)
        return inputs


def bucketed(network: nn.Module, passes: int = 1, *, held: bool = False, own: int = -1) -> tuple[BucketedGradient, Heard]:
    torch.manual_seed(1)
    model = FlatModel(network)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BUCKET_NBYTES", 80)
        cut = buckets(model.layers, slice_bounds(model.size, 2))
    heard: Any = Heard(model, cut)
    gradient = Passes(model, passes)
    return BucketedGradient(gradient, gradient, model, cut, heard, held=held, own=own), heard


@pytest.mark.parametrize("kind", spread(KINDS, 3))
@pytest.mark.parametrize("held", [False, True])
def test_weights_come_before_they_are_used_and_gradients_leave_when_they_are_whole(kind: str, held: bool) -> None:
    """Weights are NaN until they are needed; what was left is bit for bit the gradient of the whole vector, or twice what is made
    of it at the end."""
    whole, model = Batch(FlatModel(seeded(kind))), FlatModel(seeded(kind))
    cut = buckets(model.layers, slice_bounds(model.size, 2), nbytes=80)
    exchange, batch = Shards(model, [(bucket.start, bucket.end) for bucket in cut]), Batch(model)
    gradient = BucketedGradient(batch, batch, model, cut, exchange, held=held, own=-1)  # type: ignore[arg-type]
    for seq in range(3):
        whole.prepare(seq)
        expected = whole.compute(seq)
        exchange.take_back()
        gradient.prepare(seq)
        assert gradient.compute(seq) == expected
        assert sorted(exchange.told) == [(what, number) for what in ("leave", "need") for number in range(len(cut))], "each once"
        assert torch.equal(exchange.gradients * (1.0 if held else 0.5), whole.model.gradients)


def test_weights_that_are_used_without_a_call_are_refused_by_name() -> None:
    """Called in the first mini-batch, so that they may be waited for."""
    calls = itertools.count()
    model = FlatModel(Net(lambda net, x: net.a(x) if next(calls) == 0 else F.linear(x, net.a.weight), a=nn.Linear(6, 6)))
    cut = buckets(model.layers, slice_bounds(model.size, 2), nbytes=80)
    exchange, batch = Shards(model, [(bucket.start, bucket.end) for bucket in cut]), Batch(model)
    gradient = BucketedGradient(batch, batch, model, cut, exchange, held=True, own=-1)  # type: ignore[arg-type]
    gradient.prepare(0)
    with pytest.raises(ConfigError, match=r"expected 'whole' for this model: its weights were used before .*: parameter a.weight"):
        gradient.compute(0)


def test_each_bucket_is_told_once_as_soon_as_its_gradient_is_there() -> None:
    gradient, heard = bucketed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    for seq in range(2):
        assert gradient.compute(seq) == 1.0
        assert heard.left == [(3, True), (2, True), (1, True), (0, True)]
        heard.left.clear()


def test_own_buckets_are_left_when_all_others_are() -> None:
    gradient, heard = bucketed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), own=1)
    gradient.compute(0)
    assert heard.left == [(1, True), (0, True), (3, True), (2, True)]


def test_what_the_backward_pass_never_comes_to_is_told_at_its_end() -> None:
    gradient, heard = bucketed(Partly(*(nn.Linear(4, 4) for _ in range(4))))
    gradient.compute(0)
    assert heard.left == [(2, True), (1, True), (0, True), (3, False)]


def test_a_layer_that_is_used_twice_is_there_once() -> None:
    shared = nn.Linear(4, 4)
    gradient, heard = bucketed(nn.Sequential(shared, nn.Linear(4, 4), shared, nn.Linear(4, 4)))
    gradient.compute(0)
    assert sorted(number for number, _ in heard.left) == list(range(len(heard.cut)))


def test_held_all_are_told_after_the_last_pass() -> None:
    gradient, heard = bucketed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), passes=2, held=True)
    gradient.compute(0)
    assert heard.left == [(1, True), (0, True)]


def test_gradients_that_come_in_parts_are_refused_by_name() -> None:
    gradient, _ = bucketed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), passes=2)
    with pytest.raises(ConfigError, match=r"expected 'whole' .*: its gradient came in parts: parameter 1\.(weight|bias)"):
        gradient.compute(0)
