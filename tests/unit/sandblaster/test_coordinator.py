"""The coordinator by itself: torch's L-BFGS asks for a point as often as it likes, and it is evaluated once."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mpisgd.comm.messages import Ending
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.log.schema import Why
from mpisgd.sandblaster.coordinator import Coordinator
from mpisgd.sandblaster.remote import Slot
from mpisgd.sandblaster.replayed_slots import Here
from mpisgd.vectors.flat import slice_bounds
from tests.unit.sandblaster.test_remote import HISTORY, optimiser

START = torch.linspace(-2.4, 2.2, 31)


def evaluate(weights: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Many hills: a line search tries far points, and comes back."""
    weights = weights.clone().requires_grad_()
    loss = (torch.sin(7 * weights) + 0.5 * weights**2).sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    return loss.item(), gradient


class Function:
    """Evaluations of a function of the weights, in the place of learners'."""

    def __init__(self, here: Here) -> None:
        self.clock = 0
        self.seconds = 0.0
        self.points: list[bytes] = []
        self._here = here

    def evaluate(self, point: Slot, out: int, step: float) -> tuple[float, float]:
        weights = torch.empty(len(START))
        self._here.begin(point.number, weights.numpy())
        self.points.append(weights.numpy().tobytes())
        loss, gradient = evaluate(weights)
        self._here.push(gradient.numpy(), 0, self.clock, 1)
        self.clock += 1
        return loss, sum(self._here.end(out))

    def end(self, ending: Ending) -> None:
        """Nobody waits."""


def coordinated(iterations: int, shards: int = 1) -> tuple[Function, list[dict[str, Any]], torch.Tensor]:
    here = Here(START, slice_bounds(len(START), shards), lambda: None)
    function, rows = Function(here), list[dict[str, Any]]()
    options = SandblasterOptions(iterations=iterations, history=HISTORY, tolerance_change=0.0, tolerance_grad=0.0)
    coordinator = Coordinator(
        here, function, options, len(START), lambda **row: rows.append(row), on_iteration=lambda *_: None, warn=lambda _: None
    )
    coordinator.run()
    return function, rows, here.weights()


def by_torch(iterations: int) -> tuple[list[list[bytes]], torch.Tensor]:
    """The points that each step asks for, the first of which is where it stands; and where it ends."""
    parameter, steps = torch.nn.Parameter(START.clone()), list[list[bytes]]()
    lbfgs = optimiser(parameter)
    lbfgs.param_groups[0]["tolerance_grad"] = 0.0

    def closure() -> float:
        loss, parameter.grad = evaluate(parameter.detach())
        steps[-1].append(parameter.detach().numpy().tobytes())
        return loss

    for _ in range(iterations):
        steps.append([])
        lbfgs.step(closure)  # type: ignore[no-untyped-call]
    return steps, parameter.detach()


def test_no_point_is_evaluated_twice_and_all_else_is_as_torch_asks() -> None:
    """The last of these line searches goes back to a trial before its last one: that is known, too."""
    function, rows, found = coordinated(12)
    steps, weights = by_torch(len(rows))
    assert function.points == [steps[0][0], *(point for step in steps for point in step[1:])]
    assert torch.equal(found, weights)
    assert sum(row["evaluations"] for row in rows) == function.clock == rows[-1]["clock"]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["history"] for row in rows][:7] == [0, 1, 2, 3, 4, 5, 5]


def test_losses_fall_and_the_last_row_says_why_it_ends() -> None:
    _, rows, _ = coordinated(200, shards=3)
    assert all(one["loss"] > other["loss"] for one, other in itertools.pairwise(rows[:-1]))
    assert [row["why"] for row in rows[:-1]] == [Why.GOES_ON] * (len(rows) - 1)
    assert rows[-1]["why"] in (Why.ITERATIONS, Why.LINE_SEARCH, Why.CHANGE, Why.GRADIENT, Why.DIRECTION)
