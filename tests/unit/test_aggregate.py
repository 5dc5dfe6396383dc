"""A team of ranks without MPI: who waits for whom, and what is summed where (`aggregate.py`)."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import ProtocolError
from mpisgd.config import StragglerOptions
from mpisgd.gradient.aggregate import Leader, Member, follow, team_loss
from mpisgd.gradient.local_steps import LocalSteps
from mpisgd.gradient.rounding import Rounded
from mpisgd.gradient.straggler import Delays

SIZE = 10


class Memory:
    """What threads share, and where they meet; nobody waits for ever."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.barrier = threading.Barrier(places, timeout=20)
        self.vectors = [np.full(SIZE, np.nan, np.float32) for _ in range(1 + places)]
        self.words = np.full(1 + 3 * places, np.nan)


class ThreadNode:
    def __init__(self, memory: Memory, place: int) -> None:
        self.place, self.places = place, memory.places
        self.memory = memory
        self.disbanded = False

    def vectors(self, count: int, size: int) -> list[np.ndarray]:
        assert (count, size) == (len(self.memory.vectors), SIZE)
        return self.memory.vectors

    def words(self, count: int) -> np.ndarray:
        assert count == len(self.memory.words)
        return self.memory.words

    def meet(self) -> None:
        self.memory.barrier.wait()

    def disband(self) -> None:
        self.disbanded = True


class Wire:
    """A clock of ten milliseconds a look, and a note of what was slept."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.ns = 0
        self.signal = 0

    def now_ns(self) -> int:
        self.ns += 10_000_000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Rank:
    """A rank's gradient: the weights times (1 + its place + mini-batch), after a while; it tells what it does."""

    def __init__(self, place: int, told: list[tuple[str, int, int]], nap: Callable[[], None]) -> None:
        self.place = place
        self.told = told
        self.nap = nap
        self.samples = 4 + place
        self.wire_weights = np.zeros(SIZE, np.float32)
        self.wire_gradients = np.zeros(SIZE, np.float32)

    def live_in(self, weights: np.ndarray, gradients: np.ndarray) -> None:
        if not np.isnan(self.wire_weights).any():
            weights[:], gradients[:] = self.wire_weights, self.wire_gradients
        self.wire_weights, self.wire_gradients = weights, gradients

    def prepare(self, seq: int) -> None:
        self.nap()
        self.wire_gradients[:] = 0
        self.told.append(("prepare", self.place, seq))

    def compute(self, seq: int) -> float:
        self.nap()
        self.told.append(("compute", self.place, seq))
        self.wire_gradients += self.wire_weights * (1 + self.place + seq)
        return 10.0 * self.place + seq

    def interrupt_by(self, check: Callable[[], None]) -> None: ...


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("places", [1, 2, 3, 12])
def test_nobody_goes_on_too_early(places: int, seed: int) -> None:
    """Whoever is slow at what: the sum holds all gradients when it is pushed, and these are of the weights that were pulled."""
    rounds, told, memory, generator = 4, [], Memory(places), random.Random(seed)
    waits = {place: [generator.choice([0.0, 0.0, 0.01]) for _ in range(50)] for place in range(places)}
    members: list[Member] = []

    def nap_of(place: int) -> Callable[[], None]:
        return lambda: time.sleep(waits[place].pop())

    for place in range(places):
        rank = Rank(place, told, nap_of(place))
        member = Member(ThreadNode(memory, place), rank, Delays(StragglerOptions(), 1, place), Wire())  # type: ignore[arg-type]
        member.add = slowly(member.add, rank.nap)  # type: ignore[method-assign]
        members.append(member)
    others = [threading.Thread(target=follow, args=(member,), daemon=True) for member in members[1:]]
    for thread in others:
        thread.start()
    leader = Leader(members[0], drop_nonfinite=True)
    leader.prepare(0)
    for seq in range(rounds):
        leader.wire_weights[:] = np.arange(SIZE) + seq  # pulled
        told.append(("pull", 0, seq))
        loss = leader.compute(seq)
        pushed = leader.wire_gradients.copy()
        told.append(("push", 0, seq))
        assert pushed.tolist() == [(number + seq) * sum(1 + place + seq for place in range(places)) for number in range(SIZE)]
        assert loss == sum(10.0 * place + seq for place in range(places)) / places
        assert leader.samples == sum(4 + place for place in range(places))
        leader.prepare(seq + 1)
    leader.stop()
    for thread in others:
        thread.join(timeout=20)
        assert not thread.is_alive()
    for seq in range(rounds):
        place = {event: at for at, event in enumerate(told)}
        for number in range(places):
            assert place["pull", 0, seq] < place["compute", number, seq] < place["push", 0, seq]
            assert place["compute", number, seq] < place["prepare", number, seq + 1]
    for member in members:
        member.disband()
        assert member.node.disbanded  # type: ignore[attr-defined]
        assert member.gradient.wire_weights is not memory.vectors[0], "the model has memory of its own again"
        assert member.gradient.wire_weights.tolist() == (np.arange(SIZE) + rounds - 1).tolist()


def slowly(action: Callable[[], None], nap: Callable[[], None]) -> Callable[[], None]:
    def slow() -> None:
        nap()
        action()

    return slow


def test_a_straggler_waits_before_the_sum() -> None:
    """Three times as long as its 10 ms of work, by its own number."""
    memory, wire = Memory(1), Wire()
    delays = Delays(StragglerOptions(slowdown={5: 3.0}), seed=1, learner_id=5)
    rank = Rank(0, [], lambda: None)
    member = Member(ThreadNode(memory, 0), rank, delays, wire)  # type: ignore[arg-type]
    member.compute(0)
    assert wire.slept == [pytest.approx(0.02)]


def test_where_only_sizes_travel_nothing_is_shared() -> None:
    class Sized:
        wire_weights: Any = object()
        wire_gradients: Any = object()
        samples = 4

        def compute(self, seq: int) -> float:
            return 0.0

    member = Member(ThreadNode(Memory(1), 0), Sized(), Delays(StragglerOptions(), 1, 0), Wire())  # type: ignore[arg-type]
    leader = Leader(member, drop_nonfinite=True)
    assert leader.wire_gradients is Sized.wire_gradients
    assert leader.compute(0) == 0.0
    member.disband()


def test_the_loss_of_a_team() -> None:
    large = np.full(3, 3e38, np.float32)
    assert team_loss([1.0, 2.0, 6.0], None) == 3.0
    assert team_loss([1.0, 2.0, 6.0], large) == 3.0
    assert math.isnan(team_loss([1.0, 2.0], np.array([1.0, math.inf], np.float32)))
    assert math.isnan(team_loss([1.0, math.nan], None))
    assert team_loss([0.1], None) == 0.1, "of one rank, its very bits"


@pytest.mark.parametrize(
    "stage",
    [lambda below: Rounded(below, tell_nonfinite=False), lambda below: LocalSteps(below, 2, lambda clock: 0.1)],
    ids=["rounded", "own steps"],
)
def test_a_stage_that_would_keep_its_own_memory_is_refused(stage: Callable[[Any], Any]) -> None:
    """It would train on, unseen by its team."""
    member = stage(Rank(0, [], lambda: None))
    with pytest.raises(ProtocolError, match=f"{type(member).__name__} cannot move into shared memory"):
        Member(ThreadNode(Memory(2), 0), member, Delays(StragglerOptions(), 1, 0), Wire())  # type: ignore[arg-type]
