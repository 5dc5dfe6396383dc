"""Gradients into an optimiser step: against torch.optim itself, by hand, and under random orders of what arrives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.config import AdagradOptions, AdamOptions, AdamwOptions, OptimizerOptions, RmspropOptions, SgdOptions, StepOptions
from mpisgd.update.average import Average
from mpisgd.update.optimizer import CACHED_NBYTES, Stepper, make_optimizer, slots_of
from mpisgd.update.schedule import make as make_schedule
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.body import Body
from mpisgd.vectors.chunks import CHUNK_NBYTES, Rest, cuts
from mpisgd.vectors.memory import host_view
from tests.effort import examples
from tests.unit.fakes import tensor
from tests.unit.update.give import come, give

SIZE = 37
PLAIN = SgdOptions(momentum=0.0)


def updater(weights: torch.Tensor, options: OptimizerOptions = PLAIN, **fields: Any) -> SliceUpdate:
    given = {"learning_rate": 1.0, "schedule": lambda _: 1.0, "train_samples": 10, **fields}
    return SliceUpdate(weights, options, **given)


def add(update: SliceUpdate, gradient: Any, weight: float = 1.0, samples: int = 1) -> None:
    give(update, gradient, weight, samples)


@pytest.mark.parametrize("cached_nbytes", [0, 10**9])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (SgdOptions(momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
        (SgdOptions(momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (SgdOptions(0.9, True, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, 0, 0.01, nesterov=True)),
        (SgdOptions(0.0, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (AdagradOptions(0.01, 1e-8), lambda p: torch.optim.Adagrad(p, 0.1, 0, 0.01, eps=1e-8)),
        (AdamOptions(0.8, 0.99, 1e-6, 0.01), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.99), 1e-6, 0.01)),
        (AdamwOptions(0.8, 0.99, 1e-6, 0.1), lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.99), 1e-6, 0.1)),
        (RmspropOptions(0.8, 0.5, 0.1, 0.01), lambda p: torch.optim.RMSprop(p, 0.1, 0.8, 0.1, 0.01, 0.5)),
    ],
)
def test_a_step_is_torchs(
    options: OptimizerOptions, reference: Callable[..., Any], cached_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, over updates of several weighted gradients."""
    monkeypatch.setattr("mpisgd.update.optimizer.CACHED_NBYTES", cached_nbytes, raising=False)  # chooses between SGD's two kernels
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(SIZE, generator=generator)
    update = updater(start.clone(), options, learning_rate=0.1)
    parameter = torch.nn.Parameter(start.clone())
    optimiser = reference([parameter])
    for count in (1, 3, 2, 1, 4):
        gradients = torch.randn(count, SIZE, generator=generator)
        mean = torch.zeros(SIZE)
        for place, gradient in enumerate(gradients):
            add(update, gradient.numpy(), weight=1 / (place + 1))
            mean = gradient.clone() if place == 0 else mean.add_(gradient, alpha=1 / (place + 1))
        step = update.step()
        assert (step.gradients, step.learning_rate) == (count, 0.1)
        parameter.grad = mean.div_(count) if count > 1 else mean
        optimiser.step()
        assert torch.equal(update.weights, parameter.detach())


def test_weights_go_into_the_gradient_before_momentum() -> None:
    """v <- m v + w g; a weight on the step would scale what old gradients left in v as well."""
    update = updater(tensor(0.0), SgdOptions(momentum=0.5))
    add(update, 1.0)
    update.step()
    add(update, 1.0, weight=0.25)
    update.step()
    assert update.weights.item() == -1.0 - (0.5 * 1.0 + 0.25)


def test_the_divisor_is_counted() -> None:
    update = updater(tensor(0.0))
    for gradient in (1.0, 2.0, 6.0):
        add(update, gradient)
    assert update.step().gradients == 3
    assert update.weights.item() == -3.0
    add(update, 4.0, weight=0.5)
    add(update, 4.0, weight=0.5)
    update.step()
    assert update.weights.item() == -3.0 - 2.0  # 1/c and not 1 / (sum of weights) [Zhang16 eq. 2]


rounds = st.lists(st.lists(st.tuples(st.integers(-8, 8), st.sampled_from([1.0, 0.5, 0.25]), st.booleans()), max_size=4), max_size=8)


@pytest.mark.deeper
@settings(max_examples=examples(400, of=8), deadline=None)
@given(rounds=rounds)
def test_no_order_of_arrivals_loses_or_doubles_a_gradient(rounds: list[list[tuple[int, float, bool]]]) -> None:
    """Memory is used again: what was received and dropped, or summed before, must not come back."""
    update = updater(torch.zeros(3))
    expected, samples = np.zeros(3), 0
    for gradients in rounds:
        applied = []
        for value, weight, dropped in gradients:
            gradient = value * np.array([1.0, -2.0, 4.0])
            came = come(update, gradient)
            if not dropped:
                give(update, came, weight, samples=3)
                applied.append(weight * gradient)
        assert update.step().gradients == len(applied)
        samples += 3 * len(applied)
        if applied:
            expected -= np.mean(applied, axis=0)
        assert update.samples == samples
        np.testing.assert_allclose(update.weights.numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(update.served, update.weights.numpy())


def test_sums_of_teams_are_divided_by_all_their_gradients() -> None:
    """Law 3: teams of three and of one; and a single team, for which nothing is added up here."""
    update = updater(torch.zeros(2))
    for gradient, gradients in (([6.0, 3.0], 3), ([2.0, 1.0], 1)):
        give(update, gradient, 1.0, samples=4 * gradients, gradients=gradients)
    assert update.step().gradients == 4
    assert update.weights.tolist() == [-2.0, -1.0]
    give(update, [4.0, 8.0], 1.0, samples=16, gradients=4)
    step = update.step()
    assert (step.gradients, update.samples) == (4, 32)
    assert math.isnan(step.sum_sq), "one push is no second batch size"
    assert update.weights.tolist() == [-3.0, -3.0]


def test_gradients_that_are_kept_for_later_come_back_as_they_were() -> None:
    """Whatever was received, summed and updated in between; their buffers are used again."""
    update = updater(torch.zeros(3))
    expected, kept = np.zeros(3), dict[int, Body]()
    for start in (1.0, 10.0, 100.0):
        for learner_id in (3, 1, 2):
            kept[learner_id] = come(update, start * learner_id)
        add(update, start * np.array([1.0, 2.0, 3.0]))
        for learner_id in (1, 2, 3):
            assert kept[learner_id].vector.tolist() == [start * learner_id] * 3
            give(update, kept[learner_id])
        update.step()
        expected -= start * (np.array([1.0, 2.0, 3.0]) + 6) / 4
    np.testing.assert_allclose(update.weights.numpy(), expected, rtol=1e-6)
    assert update.bodies.made == 4, "as many as there were at a time"


def test_memory_for_kept_gradients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpisgd.vectors.body.PARKED_NBYTES", 24)
    update = updater(torch.zeros(3))
    room = []
    for _ in range(3):
        room.append(update.bodies.has_room)
        come(update, 1.0)
    assert room == [True, True, False]


def test_what_is_served_is_the_weights_themselves() -> None:
    weights = torch.zeros(3)
    update = updater(weights)
    add(update, [1.0, 2.0, 3.0])
    update.step()
    assert update.served.tolist() == [-1.0, -2.0, -3.0]
    assert update.served.__array_interface__["data"] == host_view(weights).__array_interface__["data"]


def test_averaged_weights_follow_the_papers_formula() -> None:
    """thetabar <- a thetabar + (1 - a) theta after each update [Chen16 Alg. 2, 4], from the initial weights."""
    weights = tensor(1.0, -2.0)
    update = updater(weights, average=Average(weights, 0.75))
    expected = np.array([1.0, -2.0])
    assert update.averaged is not None
    for gradient in (1.0, 0.5, -3.0):
        add(update, gradient)
        update.step()
        expected = 0.75 * expected + 0.25 * update.weights.numpy()
        np.testing.assert_allclose(update.averaged.numpy(), expected, rtol=1e-6)
    assert updater(tensor(1.0)).averaged is None


@pytest.mark.parametrize("a", [0.75, 0.9999])
def test_averaged_weights_without_the_initial_ones_are_adams(a: float) -> None:
    """(thetabar - a^t theta(0)) / (1 - a^t), thetabar by the paper's formula: what Adam does to its means, which begin with 0."""
    weights = tensor(100.0, -200.0)
    update = updater(weights, average=Average(weights, a, bias_correction=True))
    initial = thetabar = np.array([100.0, -200.0])
    assert update.averaged is not None
    for t, gradient in enumerate((1.0, 0.5, -3.0, 2.0), start=1):
        add(update, gradient)
        update.step()
        assert update.step().gradients == 0, "and an update of nothing does not count"
        thetabar = a * thetabar + (1 - a) * update.weights.numpy().astype(float)
        np.testing.assert_allclose(update.averaged.numpy(), (thetabar - a**t * initial) / (1 - a**t), rtol=1e-5)
        assert t > 1 or torch.equal(update.averaged, update.weights)


def test_an_update_of_nothing_leaves_everything() -> None:
    """All gradients of an update were dropped: no step on old momentum, no decay, no average, no samples."""
    weights = tensor(1.0)
    update = updater(weights, SgdOptions(momentum=0.9, weight_decay=0.1), average=Average(weights, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert update.step().gradients == 0
        add(update, 1.0)
        update.step()
    before, averaged = update.weights.clone(), update.averaged.clone()
    come(update, math.nan)
    assert update.step().gradients == 0
    assert torch.equal(update.weights, before)
    assert torch.equal(update.averaged, averaged)
    assert update.samples == 1


@pytest.mark.parametrize(
    ("gradient", "finite"),
    [
        ([0.0, 1.0, -2.0], True),
        ([math.nan, 1.0, 1.0], False),
        ([1.0, 1.0, math.inf], False),
        ([1.0, -math.inf, 1.0], False),
        ([math.inf, -math.inf, math.nan], False),
        ([3e38, 3e38, -3e38], True),  # its squared norm is not finite
        ([1e20, 0.0, 0.0], True),
        ([3e38, math.nan, 0.0], False),
        ([1e-45, 0.0, 0.0], True),
    ],
)
def test_only_what_is_not_finite_is_called_so(gradient: list[float], finite: bool) -> None:
    update = updater(torch.zeros(3))
    came = come(update, gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a run in which thousands of gradients are huge prints nothing either
        assert came.is_finite() is finite


def test_the_learning_rate_follows_samples_not_updates() -> None:
    """10 training samples; divided by 10 after epoch 1, whatever number of updates that took."""
    schedule = make_schedule(StepOptions(epochs=(1.0, 2.0)), 3.0)
    few, many = (updater(tensor(0.0), learning_rate=2.0, schedule=schedule) for _ in range(2))
    for samples, update, expected in [
        (4, many, 2.0), (4, many, 2.0), (1, many, 2.0), (1, many, 0.2), (9, many, 0.2), (1, many, 0.02), (30, many, 0.02),
        (10, few, 0.2), (10, few, 0.02),
    ]:  # fmt: skip
        add(update, 0.0, samples=samples)
        used = update.learning_rate
        assert update.step().learning_rate == used
        assert update.learning_rate == pytest.approx(expected)
    assert (few.samples, few.epochs) == (20, 2.0)


def test_the_rate_of_the_schedule_is_the_rate_of_the_step() -> None:
    update = updater(tensor(0.0), learning_rate=2.0, schedule=make_schedule(StepOptions(epochs=(1.0,)), 3.0))
    for _ in range(2):
        add(update, 1.0, samples=10)
        update.step()
    assert update.weights.item() == pytest.approx(-2.0 - 0.2)


def moved(options: OptimizerOptions, weights: list[float]) -> float:
    """How far the last update goes, where the gradients of the updates had these weights."""
    update, before = updater(tensor(0.0), options), 0.0
    for number, weight in enumerate(weights):
        before = update.weights.item()
        add(update, 0.1 + 0.001 * (number % 7), weight=weight)
        update.step()
    return before - update.weights.item()


ADAPTIVE = [AdagradOptions(), RmspropOptions(), AdamOptions(beta2=0.99), AdamwOptions(beta2=0.99, weight_decay=0.0)]


@pytest.mark.parametrize("options", ADAPTIVE, ids=str)
def test_a_weight_that_all_gradients_share_cancels_in_adaptive_optimisers(options: OptimizerOptions) -> None:
    assert moved(options, [0.1] * 50) == pytest.approx(moved(options, [1.0] * 50), rel=1e-3)
    assert moved(SgdOptions(momentum=0.0), [0.1] * 50) == pytest.approx(0.1 * moved(SgdOptions(momentum=0.0), [1.0] * 50))


@pytest.mark.parametrize("options", [AdagradOptions(eps=1.0), RmspropOptions(eps=1.0), AdamOptions(eps=1.0)], ids=str)
def test_but_not_beside_a_large_eps(options: OptimizerOptions) -> None:
    """There they are nearly SGD."""
    assert moved(options, [0.1] * 50) < 0.2 * moved(options, [1.0] * 50)


@pytest.mark.parametrize("options", ADAPTIVE, ids=str)
def test_nor_just_after_the_weight_has_changed_and_never_quite_in_adagrad(options: OptimizerOptions) -> None:
    """Staleness grows when the others join: what was given before, at weight 1, is still in the divisor."""
    before, small = [1.0] * 50, [0.1]
    at_once = moved(options, before + small) / moved(options, [*before, 1.0])
    long_after = moved(options, before + small * 1000) / moved(options, before + [1.0] * 1000)
    if isinstance(options, AdagradOptions):
        assert at_once < 0.2
        assert long_after < 0.9
    else:
        assert at_once < 0.95
        assert long_after == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [50, CACHED_NBYTES // 4 + 1, CACHED_NBYTES // 4 + 29])
def test_sgd_has_the_bits_of_torchs_own_from_the_first_step_on(momentum: float, nesterov: bool, size: int) -> None:
    options = SgdOptions(momentum=momentum, nesterov=nesterov and momentum > 0, weight_decay=0.1)
    ours, theirs = torch.linspace(-1, 1, size), torch.nn.Parameter(torch.linspace(-1, 1, size))
    step = Stepper(make_optimizer(options, parameter := torch.nn.Parameter(ours), 0.1), parameter)
    torchs = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, nesterov=options.nesterov, weight_decay=0.1)
    for divisor in (3, 1, 2):
        gradient = torch.randn(size) * divisor
        theirs.grad = gradient / divisor
        step(gradient, divisor, 0, size)
        torchs.step()
        assert torch.equal(ours, theirs.detach())


TORCHS: dict[OptimizerOptions, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    AdagradOptions(weight_decay=0.1): lambda them: torch.optim.Adagrad(them, lr=0.1, weight_decay=0.1),
    RmspropOptions(smoothing=0.9, eps=1e-7, momentum=0.0): lambda them: torch.optim.RMSprop(them, lr=0.1, alpha=0.9, eps=1e-7),
    RmspropOptions(smoothing=0.9, eps=1e-7, momentum=0.5, weight_decay=0.1): lambda them: torch.optim.RMSprop(
        them, lr=0.1, alpha=0.9, eps=1e-7, momentum=0.5, weight_decay=0.1
    ),
    AdamOptions(weight_decay=0.1): lambda them: torch.optim.Adam(them, lr=0.1, weight_decay=0.1),
    AdamwOptions(weight_decay=0.1): lambda them: torch.optim.AdamW(them, lr=0.1, weight_decay=0.1),
    SgdOptions(momentum=0.9): lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("count", [0, 5], ids=["from the first", "from the last"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", TORCHS, ids=lambda options: f"{type(options).__name__}-{getattr(options, 'momentum', '')}")
def test_chunk_by_chunk_every_optimiser_has_the_bits_of_torchs_own(options: OptimizerOptions, fused: bool, count: int) -> None:
    """`fused`: of runs of rules before 6."""
    size = 2 * CHUNK_NBYTES // 4 + 77
    ours, theirs = torch.linspace(-1, 1, size), torch.nn.Parameter(torch.linspace(-1, 1, size))
    optimizer = make_optimizer(options, parameter := torch.nn.Parameter(ours), 0.1, fused=fused)
    step, torchs = Stepper(optimizer, parameter, fused=fused), TORCHS[options]([theirs])
    if "fused" in torchs.param_groups[0]:
        torchs.param_groups[0]["fused"] = fused
    for divisor in (3, 1, 2):
        gradient = torch.randn(size) * divisor
        theirs.grad = gradient / divisor
        left = Rest(0, size)
        for cut in cuts(4 * size, count):
            if left.meets(cut.start, cut.stop):
                step(gradient, divisor, *left.take(*step.reach(cut.start, cut.stop)))
        torchs.step()
        if fused:  # whose last bits depend on where chunks end
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(ours, theirs.detach())
    own, expected = slots_of(optimizer, parameter), slots_of(torchs, theirs)
    assert own.keys() == expected.keys()
    if not fused:
        assert all(torch.equal(own[name], expected[name]) for name in own), "and steps are counted once"


@pytest.mark.parametrize("options", TORCHS, ids=str)
def test_wherever_slices_end_they_have_the_bits_of_torchs_own(options: OptimizerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the kernels of large slices."""
    monkeypatch.setattr("mpisgd.update.optimizer.CACHED_NBYTES", 1000)
    ours, theirs = torch.linspace(-1, 1, 1000), torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    slices = [torch.nn.Parameter(each) for each in ours.split([1, 500, 17, 482])]
    steps, torchs = [Stepper(make_optimizer(options, each, 0.1), each) for each in slices], TORCHS[options]([theirs])
    for divisor in (3, 1, 2, 1):
        gradient = torch.randn(1000) * divisor
        theirs.grad = gradient / divisor
        for step, part in zip(steps, gradient.split([len(each) for each in slices]), strict=True):
            step(part, divisor, 0, len(part))
        torchs.step()
        assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("options", TORCHS, ids=str)
def test_in_other_memory_it_goes_on_with_the_same_bits(options: OptimizerOptions) -> None:
    """The old memory stays as it is: from there something may yet be sent."""
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        update = updater(torch.ones(50), options, learning_rate=0.1, train_samples=4, average=Average(torch.ones(50), 0.5))
        for _ in range(4):
            before, sent = update.served, update.served.copy()
            if moves:
                update.renew_weights()
                assert update.served.ctypes.data != before.ctypes.data
            give(update, torch.randn(50).numpy(), 1.0, 2)
            update.step()
            assert (before == sent).all() == moves
        assert update.served.ctypes.data == update.weights.data_ptr()
        assert update.averaged is not None
        ends.append((update.weights.clone(), update.averaged.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
