"""What ranks tell each other at the end: every rank knows what it must, and nobody is told a row for each rank of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.job.finish import account, accounts_of, end_of


class Meeting:
    """Ranks in threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Any:
        meeting = self

        class Wire:
            def settle(self, said: np.ndarray, decide: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
                every = meeting.tell(rank, said)
                decided: np.ndarray = meeting.tell(rank, decide(np.stack(every)) if rank == 0 else None)[0]
                assert decided.shape == (size,)
                return decided

        return Wire()

    def tell(self, rank: int, said: Any) -> list[Any]:
        self._said[rank] = said
        self._barrier.wait(60)
        every = list(self._said)
        self._barrier.wait(60)
        return every

    def run(self, main: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            found[rank] = main(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.data())
def test_every_rank_is_told_the_same(size: int, data: st.DataObject) -> None:
    shards = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted))
    interrupted = data.draw(st.sets(st.integers(0, size - 1)))
    gone = data.draw(st.lists(st.integers(0, size - 1), unique=True).map(sorted))
    diverged = data.draw(st.booleans())
    meeting = Meeting(size)

    def main(rank: int) -> Any:
        said = account(clock=100 + rank, samples=rank, training_s=rank / 4, interrupted=rank in interrupted)
        found, accounts = accounts_of(meeting.of(rank), said, shards)
        told = (diverged, gone) if rank == 0 else (False, [])
        return found, accounts.tolist(), *end_of(meeting.of(rank), *told, size)

    rows = [
        account(clock=100 + each, samples=each, training_s=each / 4, interrupted=each in interrupted).tolist() for each in shards
    ]
    assert meeting.run(main) == [(bool(interrupted), rows, diverged, gone)] * size


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096])
def test_what_a_rank_is_told_grows_by_a_bit_with_each_rank(size: int) -> None:
    heard: list[int] = []

    class Rank0:
        def settle(self, said: np.ndarray, decide: Callable[[np.ndarray], np.ndarray], length: int) -> np.ndarray:
            decided = decide(np.tile(said, (size, 1)))
            assert decided.shape == (length,)
            heard.append(decided.nbytes)
            return decided

    shards = range(min(size, 64))
    assert accounts_of(Rank0(), account(clock=3), shards)[1].shape == (len(shards), 7)
    assert end_of(Rank0(), False, range(size), size) == (False, list(range(size)))
    assert heard == [8 * (1 + 7 * len(shards)), 8 * -(-(1 + size) // 64)]
