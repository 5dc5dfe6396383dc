"""LARS and LAMB on slices, beside the papers' formulas on parameters, and on the parts of those that are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mpisgd.config import GroupOptions, LambOptions, LarsOptions, OptimizerOptions
from mpisgd.update.groups import Segment, segments_of, within
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import slice_bounds
from tests.papers_loops import Lamb, Lars, no_bias
from tests.unit.update.give import give

SIZES = {"body.weight": 40, "body.bias": 5, "zero.weight": 9, "zero.bias": 4, "head.weight": 33}
SIZE = sum(SIZES.values())
BORDERS = [0, *itertools.accumulate(SIZES.values())]
GROUPS = GroupOptions({"*.bias": 0.0}, {"head.*": 0.25})
RATE, DECAY = 0.1, 0.3
KINDS: dict[OptimizerOptions, type[Lars] | type[Lamb]] = {
    LarsOptions(weight_decay=DECAY, trust=Lars.trust): Lars,
    LambOptions(beta2=Lamb.beta2, eps=Lamb.eps, weight_decay=DECAY): Lamb,
}
#: Slices that are cut between parameters, and within them.
CUTS: dict[str, list[tuple[int, int]]] = {
    "whole": [(0, SIZE)],
    "2 at borders": [(0, 45), (45, SIZE)],
    "3 at borders": [(0, 40), (40, 58), (58, SIZE)],
    "2 within": slice_bounds(SIZE, 2),
    "3 within": slice_bounds(SIZE, 3),
}


def given() -> tuple[torch.Tensor, torch.Tensor]:
    """First weights, some of which are 0, and the gradients of six updates of two."""
    generator = torch.Generator().manual_seed(2)
    weights, gradients = torch.randn(SIZE, generator=generator), torch.randn(6, 2, SIZE, generator=generator)
    weights[45:54] = 0.0
    gradients[:, :, 0:40] *= 30.0
    return weights, gradients


def updated(options: OptimizerOptions, cut: str, *, moved: bool = False, restored: bool = False) -> torch.Tensor:
    weights, gradients = given()
    segments = segments_of(GROUPS, SIZES, each_parameter=True)
    slices = []
    for start, stop in CUTS[cut]:

        def make(start: int = start, stop: int = stop) -> SliceUpdate:
            halved: dict[str, Any] = {"schedule": lambda epochs: 1.0 if epochs < 6 else 0.5, "train_samples": 1}
            parts = list(within(segments, start, stop))
            return SliceUpdate(weights[start:stop].clone(), options, learning_rate=RATE, segments=parts, **halved)

        update = make()
        for number, summed in enumerate(gradients):
            for gradient in summed:
                give(update, gradient[start:stop].numpy(), 1.0, samples=1)
            update.step()
            if moved:
                update.renew_weights()
            if restored and number == 2:
                state, update = {name: tensor.clone() for name, tensor in update.state().items()}, make()
                update.restore(state, samples=6)
        slices.append(update.weights)
    return torch.cat(slices)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: type(options).__name__)
def test_updates_are_the_papers(options: OptimizerOptions, cut: str) -> None:
    """Of whole parameters where slices are cut between them, of parts of them where not."""
    weights, gradients = given()
    edges = sorted({*BORDERS, *(start for start, _ in CUTS[cut])})
    names = [f"{edge} of {list(SIZES)[sum(border <= edge for border in BORDERS) - 1]}" for edge in edges[:-1]]
    sizes = [after - before for before, after in itertools.pairwise(edges)]
    loop = KINDS[options](dict(zip(names, weights.clone().split(sizes), strict=True)), RATE, DECAY, no_bias())
    loop.factors = {name: 0.25 for name in names if "head" in name}
    for number, summed in enumerate(gradients):
        if number == 3:
            loop.rate *= 0.5
        loop.step(dict(zip(names, summed.mean(0).split(sizes), strict=True)))
    found, expected = updated(options, cut), torch.cat(list(loop.weights.values()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert float((found - weights).abs().min()) > 0, "zeros have left, too"


@pytest.mark.parametrize("options", KINDS, ids=lambda options: type(options).__name__)
def test_whole_parameters_have_the_same_bits_however_many_slices_there_are(options: OptimizerOptions) -> None:
    whole = updated(options, "whole")
    for cut in ("2 at borders", "3 at borders"):
        assert torch.equal(updated(options, cut), whole)
    assert not torch.allclose(updated(options, "2 within"), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", KINDS, ids=lambda options: type(options).__name__)
def test_in_other_memory_and_from_a_checkpoint_it_has_the_same_bits(options: OptimizerOptions) -> None:
    once = updated(options, "3 within")
    assert torch.equal(updated(options, "3 within", moved=True), once)
    assert torch.equal(updated(options, "3 within", restored=True), once)


def test_a_parameter_is_a_segment_also_where_neighbours_are_alike() -> None:
    assert segments_of(GroupOptions(), {"a": 3, "b": 4}, each_parameter=True) == [Segment(0, 3), Segment(3, 7)]
    assert segments_of(GroupOptions(), {"a": 3, "b": 4}) == []


def test_without_momentum_lars_goes_the_trusted_share_of_each_parameter() -> None:
    """|w'- w| = gamma eta |w|, whatever the gradient's size; of weight decay 0 that is no group's, all are trusted."""
    options, sizes = LarsOptions(momentum=0.0, weight_decay=0.0, trust=0.01), {"a": 3, "b": 4}
    weights = torch.arange(1.0, 8.0)
    segments = segments_of(GroupOptions(), sizes, each_parameter=True)
    update = SliceUpdate(weights.clone(), options, learning_rate=2.0, schedule=lambda _: 1.0, train_samples=1, segments=segments)
    give(update, 1e3 * torch.randn(7, generator=torch.Generator().manual_seed(1)).numpy(), 1.0, samples=1)
    update.step()
    for part in (slice(0, 3), slice(3, 7)):
        went = (update.weights - weights)[part].norm()
        assert float(went) == pytest.approx(0.02 * float(weights[part].norm()), rel=1e-4)
