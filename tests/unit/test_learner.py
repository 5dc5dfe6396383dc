"""A learner's loop beside the papers' algorithms: pull, compute, push, pull (DESIGN 4, laws 1 and 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpisgd.config import StragglerOptions
from mpisgd.exchange.exchange import Answers, Report
from mpisgd.gradient.straggler import Delays
from mpisgd.learner import learn
from mpisgd.protocols import BackupOptions, HardsyncOptions, ProtocolOptions, SoftsyncOptions, SspOptions
from mpisgd.vectors.computing import Scaled, Waited
from mpisgd.vectors.skipped import NOTHING


class Told:
    """A channel and a gradient in one, that write down what they are told. The shards answer with `clocks`, then stop."""

    duplex = False
    exchanging_ns = 0

    samples, rounded, skipped = 16, 0.25, NOTHING
    waited, scaled = Waited(), Scaled()

    def __init__(self, clocks: list[tuple[int, ...]]) -> None:
        self.clocks = clocks
        self.calls: list[tuple[Any, ...]] = []
        self.at: list[int] = []
        self.ns = 0

    def now_ns(self) -> int:
        self.ns += 10_000_000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.calls.append(("sleep", seconds))

    def pull(self, min_clock: int, meanwhile: Callable[[], None] = lambda: None) -> Answers:
        self.calls.append(("pull", min_clock))
        meanwhile()
        clocks = self.clocks.pop(0) if self.clocks else ()
        return Answers(clocks or (0,), stop=not clocks, rejected=False)

    def prepare(self, seq: int) -> None:
        self.calls.append(("prepare", seq))

    def at_clock(self, clock: int) -> None:
        self.at.append(clock)

    def compute(self, seq: int) -> float:
        self.calls.append(("compute", seq))
        return seq / 2

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        self.calls.append(("push", report.seq, report.loss))
        self.report = report
        if meanwhile is not None:
            meanwhile()
            self.calls.append(("pushed", report.seq))

    def take_own_step(self) -> None:
        self.calls.append(("own step",))

    def goodbye(self, *, ending: int) -> None:
        self.calls.append(("goodbye", ending))


def learned(clocks: list[tuple[int, ...]], options: ProtocolOptions, straggler: StragglerOptions) -> Told:
    told = Told(clocks)
    learn(told, options.make(2), told, Delays(straggler, seed=1, learner_id=1))  # type: ignore[arg-type]
    return told


@pytest.mark.parametrize(
    ("options", "asked"),
    [(HardsyncOptions(), [0, 5, 7]), (BackupOptions(b=1), [0, 5, 7]), (SoftsyncOptions(), [0, 4, 6])],
)
def test_the_order_of_a_learners_life(options: ProtocolOptions, asked: list[int]) -> None:
    """It asks for newer weights than its oldest slice's, and counts its mini-batches."""
    told = learned([(4, 5), (6, 6)], options, StragglerOptions())
    waits = isinstance(options, HardsyncOptions | BackupOptions)  # for an answer: it prepares the next mini-batch meanwhile

    def pull_and_prepare(seq: int) -> list[tuple[Any, ...]]:
        calls = [("pull", asked[seq]), ("prepare", seq)]
        return calls if waits else calls[::-1]

    assert told.calls == [
        ("prepare", 0),
        ("pull", asked[0]),
        ("compute", 0),
        ("push", 0, 0.0),
        *pull_and_prepare(1),
        ("compute", 1),
        ("push", 1, 0.5),
        *pull_and_prepare(2),
        ("goodbye", True),
    ]
    assert told.report == Report(1, samples=16, loss=0.5, compute_ns=10_000_000, delay_ns=0, rounded=0.25)


def test_a_learner_steps_by_itself_while_its_push_is_under_way() -> None:
    """And not before a pull, which brings other weights; `prepare`, which zeroes the gradient, waits until that has left."""
    told = learned([(0,), (3,)], SspOptions(get_model_frequency=2), StragglerOptions())
    a_round = ["compute", "push", "own step", "pushed", "prepare", "compute", "push", "prepare", "pull"]
    assert [call[0] for call in told.calls] == ["prepare", "pull", *a_round, *a_round, "goodbye"]
    assert told.at == [0, 0, 3, 3], "what it computes from was pulled at these clocks"


def test_a_run_that_is_over_before_it_began() -> None:
    told = learned([], HardsyncOptions(), StragglerOptions())
    assert told.calls == [("prepare", 0), ("pull", 0), ("goodbye", True)]


def test_a_straggler_sleeps_between_computing_and_pushing() -> None:
    """Three times as long as its 10 ms of work; the work itself is told without the delay."""
    told = learned([(0,)], SoftsyncOptions(), StragglerOptions(slowdown={1: 3.0}))
    assert [call[0] for call in told.calls] == ["prepare", "pull", "compute", "sleep", "push", "prepare", "pull", "goodbye"]
    assert told.calls[3][1] == pytest.approx(0.02)
    assert told.report == Report(0, samples=16, loss=0.0, compute_ns=10_000_000, delay_ns=20_000_000, rounded=0.25)
