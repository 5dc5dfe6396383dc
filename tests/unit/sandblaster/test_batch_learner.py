"""The learner's loop under a coordinator, by itself: what it does for each answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpisgd.comm.messages import PUSH_NOW, STOP_FINISHED, STOP_INTERRUPTED, Ending
from mpisgd.gradient.straggler import NO_DELAYS
from mpisgd.sandblaster.channels import Receipts
from mpisgd.sandblaster.learner import Sum, learn
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import Memory


class Portions(Travels):
    """The gradient of portion p is p everywhere, of 2 samples, with loss 10 p."""

    def __init__(self) -> None:
        self.memory = Memory.zeros(3)
        self.samples = 2
        self.computed: list[int] = []

    def compute(self, seq: int) -> float:
        self.memory.gradients[:] = seq
        self.computed.append(seq)
        return 10.0 * seq


def done(deals: list[tuple[int, int, bool]], clocks: dict[int, int], *, alone: bool) -> tuple[list[Any], Portions]:
    """What a learner does when it is dealt these, one after the other; `clocks`: of the weights, by the clock that it asks for."""
    said: list[Any] = []
    answers = iter(deals)

    def ask(clock: int, portion: int = -1, *_: float, pushed: int = -1, **__: int) -> tuple[int, int, bool]:
        said.append(("next", clock, portion, pushed))
        return next(answers)

    gradient = Portions()
    summed = Sum(gradient, alone=alone)

    def pull(min_clock: int) -> Any:
        said.append(("pull", min_clock))
        return SimpleNamespace(clocks=(clocks.get(min_clock, min_clock), clocks.get(min_clock, min_clock)))

    def push(report: Any) -> None:
        said.append(("push", report.seq, report.samples, report.loss, summed.vector.tolist()))

    channel: Any = SimpleNamespace(pull=pull, push=push, now_ns=lambda: 0, goodbye=lambda ending: said.append(("goodbye", ending)))
    coordinator: Any = SimpleNamespace(next=ask)
    learn(coordinator, channel, Receipts(channel, ranks=()), gradient, summed, NO_DELAYS)
    return said, gradient


def test_what_counts_is_summed_and_pushed_and_weights_are_pulled_once() -> None:
    deals = [(0, 3, False), (0, 4, True), (0, 5, False), (0, PUSH_NOW, True), (1, 0, False), (1, PUSH_NOW, True)]
    said, _ = done([*deals, (1, STOP_FINISHED, False)], {}, alone=False)
    assert said == [
        ("next", -1, -1, -1),
        ("pull", 0),
        ("next", 0, 3, -1),  # counts
        ("next", 0, 4, -1),  # another was first
        ("next", 0, 5, -1),  # counts; push
        ("push", 0, 4, 40.0, np.full(3, 2 * (3 + 5)).tolist()),
        ("next", 0, -1, 0),
        ("pull", 1),
        ("next", 1, 0, -1),
        ("push", 1, 2, 0.0, [0.0, 0.0, 0.0]),
        ("next", 1, -1, 1),
        ("goodbye", Ending.FINISHED),
    ]


def test_who_comes_too_late_for_the_weights_computes_nothing() -> None:
    """Others have finished the evaluation before the pull was answered; the next one is pulled for anew."""
    deals = [(4, 7, False), (5, 1, False), (5, PUSH_NOW, True), (5, STOP_INTERRUPTED, False)]
    said, gradient = done(deals, {4: 5}, alone=True)
    assert gradient.computed == [1]
    assert said == [
        ("next", -1, -1, -1),
        ("pull", 4),
        ("next", 4, -1, -1),
        ("pull", 5),
        ("next", 5, 1, -1),
        ("push", 0, 2, 10.0, [2.0, 2.0, 2.0]),
        ("next", 5, -1, 0),
        ("goodbye", Ending.INTERRUPTED),
    ]
