"""Which ranks are there, as one rank knows: all, where a run ends with its first failure or nobody can fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mpisgd.comm.messages import Tag


class Presence:
    """All other ranks are there: nobody is ever left out.

    Attributes:
        watched: ranks that are asked for signs of life (`liveness/pulse.py`).
        unheard: those of them that have given none for too long.
    """

    watched = frozenset[int]()
    unheard = frozenset[int]()

    def give_up(self, rank: int) -> None:
        """Wait for this rank no more, not even at the end."""

    def lose(self, rank: int) -> None:
        """Another rank says that this one is dead: nothing of it is taken any more, and it is not told again."""

    def given_up(self) -> list[int]:
        """Ranks that nobody waits for, and that are not known to be dead."""
        return []

    def away(self) -> list[int]:
        """Ranks that are given up or dead, as far as is known before ranks part."""
        return []

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        """Those of these ranks that have given no sign of life for too long; from now on these are watched, and no others."""
        return frozenset()


class Losses(Presence):
    """Which ranks a fault-tolerant run has lost or given up, and what of that is still to be told (`mpi/tolerant.py`).

    Attributes:
        dead: nothing of them is taken, and nothing sent to them.
        news: (rank, LOST or STUCK) that `take` tells next.
    """

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self._replaced: set[int] = set()
        """Of these, who has been replaced, and may live."""
        self.hanging: set[int] = set()
        self.news: deque[tuple[int, int]] = deque()

    def died(self, rank: int) -> None:
        """MPI says so; told once."""
        self._replaced.discard(rank)
        if rank not in self.dead:
            self.dead.add(rank)
            self.news.append((rank, Tag.LOST))

    def give_up(self, rank: int) -> None:
        self.hanging.add(rank)

    def lose(self, rank: int) -> None:
        """Another rank has its place, as it is dead or hangs: nothing of it is taken any more, and it is not told again."""
        if rank not in self.dead:
            self._replaced.add(rank)
        self.dead.add(rank)
        self.news = deque(each for each in self.news if each[0] != rank)

    def given_up(self) -> list[int]:
        return sorted(self.hanging - (self.dead - self._replaced))

    def away(self) -> list[int]:
        return sorted(self.hanging | self.dead)

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        self.watched = frozenset(ranks)
        return self.watched & self.unheard
