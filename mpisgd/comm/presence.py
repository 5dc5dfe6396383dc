"""A rank's knowledge of the others: without fault tolerance, all are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mpisgd.comm.messages import Tag


class Presence:
    """Presence of all.

    Attributes:
        watched: ranks asked for signs of life (`liveness/heartbeat.py`).
        unheard: watched ranks silent for too long.
    """

    watched = frozenset[int]()
    unheard = frozenset[int]()

    def give_up(self, rank: int) -> None:
        """Wait no more for this rank, not even at the end."""

    def given_up(self) -> list[int]:
        """Return ranks neither waited for nor known to be dead."""
        return []

    def away(self) -> list[int]:
        """Return ranks given up or dead, as known before parting."""
        return []

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        """Watch only `ranks` from now on; return the ranks silent for too long."""
        return frozenset()


class Losses(Presence):
    """Lost and given-up ranks of a fault-tolerant run (`mpi/tolerant.py`).

    Attributes:
        dead: ranks without further traffic.
        news: (rank, LOST or STUCK) for `take` to tell next.
    """

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.hanging: set[int] = set()
        self.news: deque[tuple[int, int]] = deque()

    def died(self, rank: int) -> None:
        """Note a death seen by MPI."""
        if rank not in self.dead:
            self.dead.add(rank)
            self.news.append((rank, Tag.LOST))

    def give_up(self, rank: int) -> None:
        self.hanging.add(rank)

    def given_up(self) -> list[int]:
        return sorted(self.hanging - self.dead)

    def away(self) -> list[int]:
        return sorted(self.hanging | self.dead)

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        self.watched = frozenset(ranks)
        return self.watched & self.unheard
