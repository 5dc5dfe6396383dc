"""An update passes over what has no gradient: the bits of torch's loop whose `grad` is None now and then, and of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mpisgd.config import AdagradOptions, AdamOptions, OptimizerOptions, RmspropOptions, SgdOptions
from mpisgd.records.checkpoint.recut import cut
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import skipped
from mpisgd.vectors.flat import FlatModel, skipped_runs
from tests.unit.update.give import give

SIZES = 5, 8, 3, 16
BEGINS = np.cumsum([0, *SIZES]).tolist()

OPTIMIZERS: dict[str, tuple[OptimizerOptions, Any]] = {
    "sgd": (SgdOptions(0.9, weight_decay=0.1), lambda them: torch.optim.SGD(them, 0.1, 0.9, weight_decay=0.1)),
    "adam": (AdamOptions(weight_decay=0.1), lambda them: torch.optim.Adam(them, 0.1, weight_decay=0.1)),
    "adagrad": (AdagradOptions(weight_decay=0.1), lambda them: torch.optim.Adagrad(them, 0.1, weight_decay=0.1)),
    "rmsprop": (RmspropOptions(momentum=0.5), lambda them: torch.optim.RMSprop(them, 0.1, momentum=0.5)),
}


def made(options: OptimizerOptions, size: int = BEGINS[-1]) -> SliceUpdate:
    return SliceUpdate(torch.ones(size), options, learning_rate=0.1, schedule=lambda _: 1.0, train_samples=1)


def step(update: SliceUpdate, gradient: Tensor, runs: Any) -> None:
    give(update, gradient.numpy(), 1.0, 1, skipped=runs)
    update.step()


def drawn(rng: np.random.Generator) -> tuple[Tensor, list[bool]]:
    """A gradient, and which parameters have one: at first not all."""
    has = (rng.random(len(SIZES)) < 0.6).tolist()
    gradient = torch.from_numpy(rng.standard_normal(BEGINS[-1]).astype(np.float32))
    for each, start, end in zip(has, BEGINS, BEGINS[1:], strict=False):
        if not each:
            gradient[start:end] = 0
    return gradient, has


def runs_of(has: list[bool]) -> Any:
    return skipped.runs_of(span for each, *span in zip(has, BEGINS, BEGINS[1:], strict=False) if not each)  # type: ignore[misc]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_bits_of_torchs_loop(name: str, resumed: bool) -> None:
    options, torchs = OPTIMIZERS[name]
    rng = np.random.default_rng(3)
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer, update = torchs(parameters), made(options)
    for number in range(24):
        gradient, has = drawn(rng)
        for each, parameter, start, end in zip(has, parameters, BEGINS, BEGINS[1:], strict=False):
            parameter.grad = gradient[start:end].clone() if each else None
        optimizer.step()
        if resumed and number == 12:
            before, update = update, made(options)
            update.restore({key: value.clone() for key, value in before.state().items()}, before.samples)
        step(update, gradient, runs_of(has))
    loops = torch.cat([parameter.detach() for parameter in parameters])
    room = 1e-6 if name == "adam" else 0.0  # whose fused kernel rounds by where vectors end, and neighbours are one here
    assert torch.allclose(update.weights, loops, rtol=room, atol=room)
    check_state(update, optimizer, parameters, room)


def check_state(update: SliceUpdate, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], room: float) -> None:
    """What the optimiser keeps is torch's, steps of each parameter among it."""
    ours = {key.removeprefix("optimizer."): value for key, value in update.state().items() if key.startswith("optimizer.")}
    missed = ours.pop("missed", torch.zeros(BEGINS[-1]))
    for key, value in ours.items():
        own = value - missed if key == "step" else value
        theirs = [optimizer.state[each].get(key, torch.zeros(())).expand(each.shape) for each in parameters]
        assert torch.allclose(own, torch.cat(theirs), rtol=room, atol=room), key


def test_a_checkpoint_that_is_cut_anew_goes_on_alike() -> None:
    """One of whose shards has passed over something, and the other has not."""
    options, rng, edge = OPTIMIZERS["adam"][0], np.random.default_rng(5), BEGINS[2]
    whole, parts = made(options), [made(options, edge), made(options, BEGINS[-1] - edge)]
    for _ in range(9):
        gradient, has = drawn(rng)
        runs = runs_of([has[0], has[1], True, True])
        step(whole, gradient, runs)
        step(parts[0], gradient[:edge], skipped.within(runs, 0, edge))
        step(parts[1], gradient[edge:], skipped.within(runs, edge, BEGINS[-1]))
    states = [{name: tensor.numpy() for name, tensor in part.state().items()} for part in parts]
    assert "optimizer.missed" in states[0] and "optimizer.missed" not in states[1]
    joined = cut(states, [(0, edge), (edge, BEGINS[-1])], (0, BEGINS[-1]))
    state = whole.state()
    assert set(joined) == set(state)
    for name, tensor in state.items():
        assert torch.allclose(torch.from_numpy(joined[name]), tensor, atol=1e-6), name


runs = st.lists(st.integers(0, 30), max_size=8, unique=True).map(
    lambda them: np.array(sorted(them[: len(them) // 2 * 2])).reshape(-1, 2)
)


def elements(these: Any) -> set[int]:
    return {at for start, end in these.tolist() for at in range(start, end)}


@given(runs, runs, st.integers(0, 30), st.integers(0, 30))
def test_runs_are_sets_of_elements(one: Any, other: Any, start: int, end: int) -> None:
    assert elements(skipped.common(one, other)) == elements(one) & elements(other)
    if start < end:
        within = {at - start for at in elements(one) if start <= at < end}
        assert elements(skipped.within(one, start, end)) == within
        between = {at for first, last in skipped.between(one, start, end) for at in range(first, last)}
        assert between == set(range(start, end)) - elements(one)
    assert skipped.why_not(one, 30) == ""


@pytest.mark.parametrize("wrong", [[(-1, 2)], [(3, 3)], [(4, 6), (5, 7)], [(0, 31)], [(4, 2)]])
def test_runs_that_cannot_be_are_refused(wrong: list[tuple[int, int]]) -> None:
    assert skipped.why_not(np.array(wrong), 30).endswith("expected 0 ... 30, ascending")


def test_a_model_knows_what_a_backward_pass_has_not_come_to() -> None:
    """Also where the user's own step has cleared gradients, or a parameter has a gradient of zeros."""
    module = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)])
    model = FlatModel(module)
    x = torch.ones(1, 3)
    model.zero_gradients()
    module[0](x).sum().backward()
    module.zero_grad()
    model.take_gradients_back()
    (0.0 * module[1](x)).sum().backward()
    assert skipped_runs(model).tolist() == [[0, 8], [16, 24]]
    assert model.skipped_names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model.zero_gradients()
    assert skipped_runs(model).tolist() == [[0, 24]]
