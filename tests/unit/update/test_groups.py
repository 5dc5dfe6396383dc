"""Groups of parameters: which elements are whose, and updates of them beside torch.optim's own param_groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.base.errors import ConfigError
from mpisgd.config import AdagradOptions, AdamOptions, AdamwOptions, GroupOptions, OptimizerOptions, RmspropOptions, SgdOptions
from mpisgd.update.groups import Segment, in_pieces, segments_of, within
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import slice_bounds
from tests.unit.update.give import give

SIZES = {"body.weight": 40, "body.bias": 5, "norm.weight": 5, "norm.bias": 5, "head.weight": 33, "head.bias": 3}
GROUPS = GroupOptions({"*.bias": 0.0, "norm.*": 0.0}, {"head.*": 0.25, "body.bias": 0.0})
SEGMENTS = [
    Segment(0, 40),
    Segment(40, 45, 0.0, 0.0),
    Segment(45, 55, 1.0, 0.0),
    Segment(55, 88, 0.25),
    Segment(88, 91, 0.25, 0.0),
]


def test_neighbours_that_are_alike_are_one_segment() -> None:
    assert segments_of(GROUPS, SIZES) == SEGMENTS
    assert segments_of(GroupOptions(), SIZES) == []
    assert segments_of(GroupOptions({"*": 0.5}), SIZES) == [Segment(0, 91, 1.0, 0.5)]


def test_the_last_pattern_that_matches_decides() -> None:
    found = segments_of(GroupOptions({}, {"*": 0.5, "*.bias": 2.0, "head.bias": 3.0}), SIZES)
    assert [each.rate for each in found] == [0.5, 2.0, 0.5, 2.0, 0.5, 3.0]


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            GroupOptions({"*.biass": 0.0}),
            r"groups\.weight_decay\['\*\.biass'\] = 0\.0: .*; this pattern matches none of body\.weight, body\.",
        ),
        (
            GroupOptions({}, {"head": 2.0}),
            r"groups\.rate\['head'\] = 2\.0: .*; this pattern matches none of body\.weight, .*, head\.bias$",
        ),
        (GroupOptions({"Norm.*": 0.0}), "this pattern matches none of"),
        (
            GroupOptions({}, {"head.*": 2.0, "*": 1.0}),
            r"\['head\.\*'\] = .*; a later pattern decides for all parameters",
        ),
    ],
)
def test_a_pattern_that_decides_for_nothing_is_refused_by_its_name(groups: GroupOptions, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        segments_of(groups, SIZES)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_values_that_cannot_be(value: float) -> None:
    with pytest.raises(ConfigError, match=r"groups\.rate\['b\.\*'\] = .*: expected a finite number >= 0"):
        GroupOptions({}, {"a": 1.0, "b.*": value})
    with pytest.raises(ConfigError, match=r"groups\.weight_decay\['b\.\*'\] = .*: expected a finite number >= 0"):
        GroupOptions({"b.*": value})


def test_of_many_names_some_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"this pattern matches none of p0, .*, p11 and 88 more$"):
        segments_of(GroupOptions({"q*": 0.0}), {f"p{number}": 1 for number in range(100)})


@given(cut=st.integers(1, 90))
def test_pieces_have_segments_of_their_own(cut: int) -> None:
    """Each as who has that piece alone would see them; and without groups, each piece is one."""
    pieces = [(0, cut), (cut, 91)]
    assert in_pieces(SEGMENTS, []) == SEGMENTS
    assert in_pieces([], pieces) == [Segment(0, cut), Segment(cut, 91)]
    of_pieces = [
        each._replace(start=start + each.start, stop=start + each.stop)
        for start, end in pieces
        for each in within(SEGMENTS, start, end)
    ]
    assert in_pieces(SEGMENTS, pieces) == of_pieces


@given(shards=st.integers(1, 91))
def test_slices_have_all_segments_between_them_each_element_once(shards: int) -> None:
    """Also where they cut a layer."""
    settings: list[Any] = []
    for start, stop in slice_bounds(91, shards):
        parts = list(within(SEGMENTS, start, stop))
        assert [parts[0].start, *(each.stop for each in parts)] == [*(each.start for each in parts), stop - start]
        settings += itertools.chain(*([each[2:]] * (each.stop - each.start) for each in parts))
    assert settings == list(itertools.chain(*([each[2:]] * (each.stop - each.start) for each in SEGMENTS)))


#: Optimiser -> torch's own, given the groups of parameters.
TORCHS: dict[OptimizerOptions, Callable[..., torch.optim.Optimizer]] = {
    SgdOptions(momentum=0.0, weight_decay=0.1): lambda them, **how: torch.optim.SGD(them, weight_decay=0.1, **how),
    SgdOptions(momentum=0.9): lambda them, **how: torch.optim.SGD(them, momentum=0.9, **how),
    SgdOptions(momentum=0.9, nesterov=True, weight_decay=0.1): lambda them, **how: torch.optim.SGD(
        them, momentum=0.9, nesterov=True, weight_decay=0.1, **how
    ),
    AdagradOptions(weight_decay=0.1): lambda them, **how: torch.optim.Adagrad(them, weight_decay=0.1, **how),
    RmspropOptions(smoothing=0.9, momentum=0.5, weight_decay=0.1): lambda them, **how: torch.optim.RMSprop(
        them, alpha=0.9, momentum=0.5, weight_decay=0.1, **how
    ),
    AdamOptions(weight_decay=0.1): lambda them, **how: torch.optim.Adam(them, weight_decay=0.1, **how),
    AdamwOptions(weight_decay=0.1): lambda them, **how: torch.optim.AdamW(them, weight_decay=0.1, **how),
}


def updated(options: OptimizerOptions, shards: int, *, moved: bool = False, restored: bool = False) -> torch.Tensor:
    """The weights of all slices after four updates of several gradients, with the rate halved on the way."""
    generator = torch.Generator().manual_seed(2)
    weights, gradients = torch.randn(91, generator=generator), torch.randn(4, 3, 91, generator=generator)
    slices = []
    for start, stop in slice_bounds(91, shards):

        def make(start: int = start, stop: int = stop) -> SliceUpdate:
            halved = {"learning_rate": 0.1, "schedule": lambda epochs: 1.0 if epochs < 6 else 0.5, "train_samples": 1}
            return SliceUpdate(weights[start:stop].clone(), options, segments=list(within(SEGMENTS, start, stop)), **halved)

        update = make()
        for number, summed in enumerate(gradients):
            for gradient in summed:
                give(update, gradient[start:stop].numpy(), 1.0, samples=1)
            update.step()
            if moved:
                update.renew_weights()
            if restored and number == 1:
                state, update = {name: tensor.clone() for name, tensor in update.state().items()}, make()
                update.restore(state, samples=6)
        slices.append(update.weights)
    return torch.cat(slices)


@pytest.mark.parametrize("options", TORCHS, ids=str)
def test_updates_are_those_of_torchs_param_groups(options: OptimizerOptions) -> None:
    generator = torch.Generator().manual_seed(2)
    weights, gradients = torch.randn(91, generator=generator), torch.randn(4, 3, 91, generator=generator)
    sizes = list(SIZES.values())
    parameters = [torch.nn.Parameter(part.clone()) for part in weights.split(sizes)]
    of_each = []
    for parameter, start in zip(parameters, itertools.accumulate([0, *sizes[:-1]]), strict=True):
        own = next(each for each in reversed(SEGMENTS) if each.start <= start)
        decay = {} if own.weight_decay is None else {"weight_decay": own.weight_decay}
        of_each.append({"params": [parameter], "lr": 0.1 * own.rate, **decay})
    optimizer = TORCHS[options](of_each, lr=0.1)
    for number, (one, two, three) in enumerate(gradients):
        if number == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        mean = one.clone().add_(two).add_(three).div_(3)
        for parameter, gradient in zip(parameters, mean.split(sizes), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    found = updated(options, 1)
    assert torch.equal(found, torch.cat([each.detach() for each in parameters]))
    assert torch.equal(found[40:45], weights[40:45]), "at a rate of 0 they stay"
    assert not torch.equal(found[45:], weights[45:])


@pytest.mark.parametrize("options", TORCHS, ids=str)
def test_three_slices_have_the_elements_of_one(options: OptimizerOptions) -> None:
    assert torch.equal(updated(options, 1), updated(options, 3))


@pytest.mark.parametrize("options", TORCHS, ids=str)
def test_in_other_memory_and_from_a_checkpoint_it_goes_on_with_the_same_bits(options: OptimizerOptions) -> None:
    whole = updated(options, 2)
    assert torch.equal(whole, updated(options, 2, moved=True))
    assert torch.equal(whole, updated(options, 2, restored=True))
