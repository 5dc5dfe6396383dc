"""A team of ranks without MPI: who waits for whom, and what is summed where (`aggregate.py`)."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.virtual.cluster import VirtualRank
from mpisgd.config import Config, StragglerOptions, replace
from mpisgd.data import Split
from mpisgd.data.sampling import EpochSampling
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Leader, Member, SharedMemory, follow, team_loss
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.mini_batches import LocalSteps
from mpisgd.gradient.rounding import Rounded
from mpisgd.gradient.straggler import Delays
from mpisgd.simulate.sized import SizedGradient
from mpisgd.simulate.timed import Timed
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import Memory, SizedVector

SIZE = 10
DATA = Split(torch.arange(24.0).view(8, 3) / 24, torch.arange(16.0).view(8, 2))


def network() -> nn.Module:
    """Of ten parameters; its last two are free."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    module.register_parameter("free", nn.Parameter(torch.ones(2)))
    return module


class Room:
    """What threads share, and where they meet; nobody waits for ever."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.barrier = threading.Barrier(places, timeout=20)
        self.maps: list[np.ndarray] = []


class ThreadSegment:
    def __init__(self, memory: Room, place: int) -> None:
        self.place, self.places = place, memory.places
        self.memory = memory
        self.disbanded = False

    def segment(self, ranks: Sequence[int], sizes: Sequence[int]) -> ThreadSegment:
        """Return what a wire does."""
        self.memory.maps = self.memory.maps or [np.full(nbytes // 8, np.nan).view(np.uint8) for nbytes in sizes]
        assert [len(each) for each in self.memory.maps] == list(sizes)
        return self

    def bytes_of(self, place: int) -> np.ndarray:
        return self.memory.maps[place]

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
        self.clock = self

    def now_ns(self) -> int:
        self.ns += 10_000_000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Rank(Travels):
    """A rank's gradient: the weights times (1 + its place + mini-batch), after a while; it tells what it does."""

    def __init__(self, memory: Memory, place: int, told: list[tuple[str, int, int]], nap: Callable[[], None]) -> None:
        self.place = place
        self.told = told
        self.nap = nap
        self.samples = 4 + place
        self.memory = memory

    def prepare(self, seq: int) -> None:
        self.nap()
        self.memory.gradients[:] = 0
        self.told.append(("prepare", self.place, seq))

    def compute(self, seq: int) -> float:
        self.nap()
        self.told.append(("compute", self.place, seq))
        self.memory.gradients[:] += self.memory.weights * (1 + self.place + seq)
        return 10.0 * self.place + seq

    def interrupt_by(self, check: Callable[[], None]) -> None: ...

    def move_out(self) -> None:
        self.told.append(("move out", self.place, 0))


def sharing(places: int) -> list[SharedMemory]:
    """What the ranks of a node share, as each of them sees it."""
    room, words = Room(places), Member.words_of(places)
    wires: list[Any] = [ThreadSegment(room, place) for place in range(places)]
    return [SharedMemory.of(wire, range(places), words, SIZE) for wire in wires]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("places", [1, 2, 3, 12])
def test_nobody_goes_on_too_early(places: int, seed: int) -> None:
    """Whoever is slow at what: the sum holds all gradients when it is pushed, and these are of the weights that were pulled."""
    rounds, told, shared, generator = 4, [], sharing(places), random.Random(seed)
    waits = {place: [generator.choice([0.0, 0.0, 0.01]) for _ in range(50)] for place in range(places)}
    members: list[Member] = []

    def nap_of(place: int) -> Callable[[], None]:
        return lambda: time.sleep(waits[place].pop())

    for place in range(places):
        rank = Rank(shared[place].own, place, told, nap_of(place))
        member = Member(shared[place], rank, Delays(StragglerOptions(), 1, place), Wire())  # type: ignore[arg-type]
        member.add = slowly(member.add, rank.nap)  # type: ignore[method-assign]
        members.append(member)
    others = [threading.Thread(target=follow, args=(member,), daemon=True) for member in members[1:]]
    for thread in others:
        thread.start()
    leader = Leader(members[0], drop_nonfinite=True)
    leader.prepare(0)
    for seq in range(rounds):
        leader.memory.weights[:] = np.arange(SIZE) + seq  # pulled
        told.append(("pull", 0, seq))
        loss = leader.compute(seq)
        pushed = leader.memory.gradients.copy()
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
        assert member.segment.disbanded  # type: ignore[attr-defined]
    assert told[-places:] == [("move out", number, 0) for number in range(places)]


def slowly(action: Callable[[], None], nap: Callable[[], None]) -> Callable[[], None]:
    def slow() -> None:
        nap()
        action()

    return slow


def test_a_straggler_waits_before_the_sum() -> None:
    """Three times as long as its 10 ms of work, by its own number."""
    (shared,), wire = sharing(1), Wire()
    delays = Delays(StragglerOptions(slowdown={5: 3.0}), seed=1, learner_id=5)
    member = Member(shared, Rank(shared.own, 0, [], lambda: None), delays, wire)  # type: ignore[arg-type]
    member.compute(0)
    assert wire.slept == [pytest.approx(0.02)]


def test_where_only_sizes_travel_nothing_is_shared() -> None:
    memory, rank = Memory(SizedVector(SIZE), SizedVector(SIZE)), VirtualRank(0)
    shared = dataclasses.replace(sharing(1)[0], slots=[memory])
    member = Member(shared, SizedGradient(memory, 4, rank, None), Delays(StragglerOptions(), 1, 0), Wire())  # type: ignore[arg-type]
    leader = Leader(member, drop_nonfinite=True)
    assert leader.memory is memory
    assert leader.compute(0) == 0.0
    member.disband()


def test_the_loss_of_a_team() -> None:
    large = np.full(3, 3e38, np.float32)
    assert team_loss([1.0, 2.0, 6.0], None) == 3.0
    assert team_loss([1.0, 2.0, 6.0], large) == 3.0
    assert math.isnan(team_loss([1.0, 2.0], np.array([1.0, math.inf], np.float32)))
    assert math.isnan(team_loss([1.0, math.nan], None))
    assert team_loss([0.1], None) == 0.1, "of one rank, its very bits"


STAGES: dict[str, Callable[[Travels], Travels]] = {
    "rounded": lambda below: Rounded(below, tell_nonfinite=False),
    "own steps": lambda below: LocalSteps(below, 2, lambda clock: 0.1),
    "timed": lambda below: Timed(below, VirtualRank(0), lambda: 0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("theirs", [True, False], ids=["made in it", "beside it"])
def test_only_what_computes_in_shared_memory_is_taken_into_a_team(stage: str, theirs: bool) -> None:
    """All else would train on, unseen by the others; or step with their weights."""
    shared, _ = sharing(2)
    below = Rank(shared.own if theirs else Memory.zeros(SIZE), 0, [], lambda: None)

    def join() -> None:
        Member(shared, STAGES[stage](below), Delays(StragglerOptions(), 1, 0), Wire())  # type: ignore[arg-type]

    if theirs and stage == "timed":
        join()
        return
    with pytest.raises(ProtocolError, match="of the whole team" if theirs and stage == "own steps" else "has separate memory"):
        join()


def test_a_model_in_shared_memory_trains_there_and_leaves_as_it_is() -> None:
    """Beside the same, alone; its gradient is in its slot, and what is pulled is what it computes with."""
    alone, ours = (FlatModel(network()) for _ in range(2))
    shared, _ = sharing(2)
    config = replace(Config(), aggregation="node")
    gradients = []
    for model, memory in ((alone, None), (ours, shared.own)):
        where = stages.place(config, model, memory)
        dealt = EpochSampling(8, 4, 2, 1)
        gradients.append(Gradient(model, torch.nn.functional.mse_loss, DATA, dealt, where, seed=1, learner_id=0))
    Member(shared, gradients[1], Delays(StragglerOptions(), 1, 0), Wire())  # type: ignore[arg-type]
    for seq in range(3):
        for gradient in gradients:
            gradient.memory.weights[:] += 0.25  # pulled
        assert gradients[0].compute(seq) == gradients[1].compute(seq)
        assert shared.slots[0].gradients.tobytes() == gradients[0].memory.gradients.tobytes()
    gradients[1].move_out()
    for vector in (shared.own.weights, shared.own.gradients):
        vector.fill(np.nan)
    assert torch.equal(ours.weights, alone.weights)
    assert all(torch.equal(one, other) for one, other in zip(ours.module.parameters(), alone.module.parameters(), strict=True))
