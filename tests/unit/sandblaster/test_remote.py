"""`torch.optim.LBFGS`, unmodified, on vectors that lie on shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import Op
from mpisgd.sandblaster.remote import OPERATIONS, RemoteVector, Slot, Store
from mpisgd.sandblaster.slots import Slots
from mpisgd.vectors.flat import slice_bounds

HISTORY = 5


class Here:
    """All shards of a vector, in this process."""

    def __init__(self, weights: Tensor, shards: int) -> None:
        self.shards = [Slots(weights[start:end].clone()) for start, end in slice_bounds(len(weights), shards)]
        self.live = 1
        self.peak = 1

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        self.ask(op, out, a, b, alpha)

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        self.live += {Op.FREE: -1, Op.DOT: 0, Op.ABSMAX: 0, Op.ABSSUM: 0}.get(op, 1)
        self.peak = max(self.peak, self.live)
        return [shard.compute(op, out, a, b, alpha) for shard in self.shards]

    def whole(self, vector: RemoteVector) -> Tensor:
        return torch.cat([shard.slot(vector.slot.number) for shard in self.shards])

    def put(self, store: Store, value: Tensor) -> RemoteVector:
        number, sizes = store.new(), [len(shard.weights) for shard in self.shards]
        for shard, part in zip(self.shards, torch.split(value, sizes), strict=True):
            shard._slots[number] = part.clone()
        self.live += 1
        return RemoteVector(Slot(store, number))


def loss_of(weights: Tensor) -> Tensor:
    """Rosenbrock's, in many dimensions: line searches of several evaluations."""
    return (100 * (weights[1:] - weights[:-1] ** 2) ** 2 + (1 - weights[:-1]) ** 2).sum()


def evaluate(weights: Tensor) -> tuple[float, Tensor]:
    weights = weights.clone().requires_grad_()
    loss = loss_of(weights)
    (gradient,) = torch.autograd.grad(loss, weights)
    return loss.item(), gradient


def optimiser(parameter: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS([parameter], history_size=HISTORY, max_iter=1, max_eval=26, line_search_fn="strong_wolfe")


def by_torch(start: Tensor, steps: int) -> tuple[list[float], Tensor]:
    parameter, losses = torch.nn.Parameter(start.clone()), []
    lbfgs = optimiser(parameter)

    def closure() -> float:
        loss, parameter.grad = evaluate(parameter.detach())
        losses.append(loss)
        return loss

    for _ in range(steps):
        lbfgs.step(closure)
    return losses, parameter.detach()


def by_commands(start: Tensor, steps: int, shards: int, here: Here | None = None) -> tuple[list[float], Tensor, Here]:
    losses: list[float] = []
    here = here or Here(start, shards)
    store = Store(here, len(start))
    parameter = RemoteVector(Slot(store, 0))
    lbfgs = optimiser(parameter)

    def closure() -> float:
        loss, gradient = evaluate(here.whole(parameter))
        parameter.grad = here.put(store, gradient)
        losses.append(loss)
        return loss

    for _ in range(steps):
        lbfgs.step(closure)
    return losses, here.whole(parameter), here


START = torch.linspace(-1.2, 1.1, 31)


def test_with_one_shard_the_bits_are_those_of_torch_in_one_process() -> None:
    losses, weights = by_torch(START, 30)
    found, found_weights, _ = by_commands(START, 30, shards=1)
    assert found == losses
    assert torch.equal(found_weights, weights)
    assert losses[-1] < losses[0] / 10


def test_with_three_shards_only_dots_are_summed_in_another_order() -> None:
    losses, _ = by_torch(START, 12)
    found, _, _ = by_commands(START, 12, shards=3)
    assert found[:20] == pytest.approx(losses[:20], rel=1e-4)  # an ill-conditioned valley, which doubles small differences


def test_slots_go_when_torch_forgets_them() -> None:
    """2 m of the history, and 6 besides; what a line search has evaluated goes with it."""
    *_, here = by_commands(START, 30, shards=2)
    assert here.peak <= 2 * HISTORY + 8
    assert here.live <= 2 * HISTORY + 5


@pytest.mark.parametrize(
    "operation", [lambda v: v.exp(), lambda v: v[1:], lambda v: v.sum(), lambda v: v.abs().add_(v), torch.cumsum]
)
def test_an_operation_that_shards_do_not_know_is_refused_by_its_name(operation: Callable[..., Any]) -> None:
    vector = RemoteVector(Slot(Store(Here(START, 1), len(START)), 0))
    with pytest.raises(ProtocolError, match=r"aten\.\w+|vectors? .*on shards"):
        operation(vector, 0) if operation is torch.cumsum else operation(vector)


class Looks(Here):
    """Notes what others find in this thread while a command waits."""

    def __init__(self, weights: Tensor, shards: int) -> None:
        super().__init__(weights, shards)
        self.seen: dict[Op, set[tuple[bool, str]]] = defaultdict(set)

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        self.seen[op].add(state_of_torch())
        return super().ask(op, out, a, b, alpha)


def state_of_torch() -> tuple[bool, str]:
    return torch.is_grad_enabled(), f"{torch._C._dispatch_tls_local_include_set()}{torch._C._dispatch_tls_local_exclude_set()}"


def test_while_a_command_waits_others_find_torch_as_it_was() -> None:
    """Virtual ranks share a thread: a learner computes its gradient while the coordinator is in the middle of a step."""
    before = state_of_torch()
    _, _, here = by_commands(START, 12, shards=2, here=Looks(START, 2))
    assert isinstance(here, Looks)
    assert {Op.ADD, Op.SUB, Op.SCALE, Op.DOT, Op.ABSMAX, Op.ABSSUM, Op.FREE} == set(here.seen)
    assert {state for states in here.seen.values() for state in states} == {before}


def test_the_operations_that_torch_makes_use_of() -> None:
    """A torch that makes others is found here, and not in mid-run."""
    used = set[Any]()
    before = dict(OPERATIONS)
    for func, operation in before.items():

        def noted(*args: Any, func: Any = func, operation: Callable[..., Any] = operation, **kwargs: Any) -> Any:
            used.add(func)
            return operation(*args, **kwargs)

        OPERATIONS[func] = noted
    try:
        by_commands(START, 30, shards=2)
    finally:
        OPERATIONS.update(before)
    assert {str(each) for each in used} == {str(each) for each in OPERATIONS}
