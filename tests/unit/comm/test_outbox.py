"""Copies that bodies are sent from: never changed while they are under way, and no more of them than are (no MPI)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.comm.messages import Tag
from mpisgd.comm.mpi.transfers import Outbox
from tests.unit.fakes import Comm, wire_without_mpi

real = wire_without_mpi()
ANSWER = (0, 3, 0, 0, 0, -1, 1, 16)


class Request:
    """Of a message that its receiver has taken when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def Test(self) -> bool:
        return self.done

    def Wait(self) -> None:
        self.waited = True


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 50), max_size=4)), max_size=20))
def test_a_copy_stays_as_it_is_until_all_have_it(rounds: list[tuple[int, list[int]]]) -> None:
    """In each round a body goes to some receivers; then some messages under way, of any round, are taken."""
    outbox, weights = Outbox(), np.zeros(4, np.float32)
    under_way: list[tuple[Request, np.ndarray, float]] = []
    memories, most = set(), 0
    for number, (receivers, taken) in enumerate(rounds):
        busy = {id(copy) for request, copy, _ in under_way if not request.done}
        most = max(most, len(busy) + 1)
        weights.fill(number)
        copy = outbox.copy(weights)
        assert id(copy) not in busy
        memories.add(id(copy))
        for _ in range(receivers):
            request: Any = Request()
            outbox.keep([request])
            under_way.append((request, copy, float(number)))
        for at in taken:
            if at < len(under_way):
                under_way[at][0].done = True
        for request, sent, value in under_way:
            assert request.done or (sent == value).all()
    assert len(memories) <= most, "no more than were under way at once, and the newest"


def test_bodies_may_be_of_two_sizes() -> None:
    """Weights that are sent whole, and as bfloat16 (`deltas.py`): memory of one size is not used for the other."""
    outbox, requests = Outbox(), [Request() for _ in range(3)]
    for request in requests:
        outbox.copy(np.zeros(4, np.int16))
        outbox.keep([request])  # type: ignore[list-item]
    for request in requests:
        request.done = True
    for size in (4, 2, 2, 4):
        body = np.full(size, size, np.int16)
        assert outbox.copy(body).tolist() == body.tolist()


def test_memory_is_used_again() -> None:
    outbox, weights = Outbox(), np.zeros(4, np.float32)
    copies = []
    for _ in range(5):
        copies.append(outbox.copy(weights))
        request: Any = Request()
        outbox.keep([request])
        request.done = True
    assert len({id(copy) for copy in copies}) == 1


def test_at_the_end_all_are_waited_for() -> None:
    outbox = Outbox()
    requests: Any = [Request() for _ in range(4)]
    for pair in (requests[:2], requests[2:]):
        outbox.copy(np.zeros(4, np.float32))
        outbox.keep(pair)
    outbox.empty()
    assert all(request.waited for request in requests)


@pytest.mark.parametrize(("polite", "synchronous", "copied"), [(True, "0", True), (False, "0", False), (True, "1", False)])
def test_copies_are_made_only_where_ranks_wait_politely(
    polite: bool, synchronous: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never where every send is to be synchronous: nothing may rest on a buffer (law 1)."""
    for name in ("MPISGD_WAIT", "MPISGD_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPISGD_SSEND", synchronous)
    waited: list[object] = []
    monkeypatch.setattr(real.MPI.Request, "Waitall", waited.extend)
    wire, weights = real.Wire(Comm(), polite=polite), np.zeros(4, np.float32)
    monkeypatch.setattr(wire, "_wait_politely", lambda request, most_s: waited.append(request))
    body = wire.aside(weights)
    assert (body is not weights) is copied
    wire.finish(wire.start(1, Tag.ANSWER, ANSWER, body))
    assert len(waited) == (0 if copied else 2)
    wire.finish(wire.start(1, Tag.ANSWER, ANSWER, weights))
    assert len(waited) == (2 if copied else 4), "other memory is waited for"
