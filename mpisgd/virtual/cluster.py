"""Virtual ranks in virtual time: greenlets, and one heap of events ordered by (virtual nanoseconds, serial number).

Each rank has a clock of its own. Its code between two blocking calls depends on nothing but what it was sent, so a rank whose
wait is over may run at once, ahead of the others: all it does is send messages into their future. Two things depend on the
order of time, and happen only when no rank can act before them any more (`first_at`): a message becomes visible to a receiver
that takes whatever comes, and a transfer occupies links. Both are events; those of one nanosecond happen in the order of their
serial numbers, which makes runs repeat exactly.

A rank that cannot go on hands its thread to the next that can. Where there is none, and ranks are left, nothing will ever
happen: `DeadlockError` says who waits for whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from greenlet import getcurrent, greenlet

from mpisgd.errors import DeadlockError

_NEVER = 1 << 62


class Event(Protocol):
    """Something that happens at a virtual nanosecond."""

    def happen(self, now_ns: int) -> VirtualRank | None:
        """Do it; a rank that must go on at this very nanosecond is returned."""


class Waiting(Protocol):
    """What a rank waits for."""

    def describe(self) -> tuple[str, int | None]:
        """In words, and the rank that would have to act (None = any)."""


class VirtualRank:
    """One rank: its clock, and its greenlet."""

    __slots__ = ("cluster", "greenlet", "now", "rank", "waiting")

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.now = 0
        self.greenlet: greenlet
        self.waiting: Waiting | None = None

    def happen(self, now_ns: int) -> VirtualRank:
        """A rank is also the event that it goes on."""
        return self


class Cluster:
    """All ranks of a virtual cluster.

    Args:
        name: what a rank is called in messages: `"learner 3"`.
    """

    def __init__(self, size: int, name: Callable[[int], str]) -> None:
        self.name = name
        self.ranks = [VirtualRank(self, rank) for rank in range(size)]
        self.ready: deque[VirtualRank] = deque()
        self.ready_from = _NEVER
        self.heap: list[tuple[int, int, Event]] = []
        self.serial = count()
        self._meeting: list[VirtualRank] = []
        self._alive = 0

    def run(self, mains: list[Callable[[], None]]) -> None:
        """Run one main for each rank until all have returned.

        Raises what a main raised, or DeadlockError.
        """
        hub = getcurrent()
        self._alive = len(mains)

        def whole(main: Callable[[], None]) -> None:
            main()
            self._alive -= 1

        for rank, main in zip(self.ranks, mains, strict=True):
            rank.greenlet = greenlet(lambda main=main: whole(main), parent=hub)
            self.ready.append(rank)
        while self._alive:
            self._next().greenlet.switch()

    # -------------------------------------------------------------------------------------------------------- scheduling

    def at(self, time_ns: int, event: Event) -> None:
        """Let something happen at `time_ns`."""
        heappush(self.heap, (time_ns, next(self.serial), event))

    def first_at(self, time_ns: int) -> bool:
        """Whether nothing can happen before `time_ns`, or at it but earlier in order."""
        heap = self.heap
        return time_ns < self.ready_from and (not heap or time_ns < heap[0][0])

    def wake(self, rank: VirtualRank, from_ns: int) -> None:
        """The wait of a rank is over: it goes on, at `from_ns` on its own clock or later, when the running one waits."""
        self.ready_from = min(self.ready_from, from_ns)
        self.ready.append(rank)

    def block(self, rank: VirtualRank, waiting: Waiting | None) -> None:
        """The running rank waits; others run until it is woken, or an event lets it go on."""
        rank.waiting = waiting
        following = self._next()
        if following is not rank:
            following.greenlet.switch()

    def until_first(self, rank: VirtualRank) -> None:
        """Let everything happen that comes before the running rank's clock."""
        if not self.first_at(rank.now):
            heappush(self.heap, (rank.now, next(self.serial), rank))
            self.block(rank, None)

    def meet(self, rank: VirtualRank) -> None:
        """A barrier of all ranks."""
        meeting = self._meeting
        meeting.append(rank)
        if len(meeting) < len(self.ranks):
            self.block(rank, _Meeting(self))
            return
        self._meeting = []
        now = max(each.now for each in meeting)
        for each in meeting:
            each.now = now
            if each is not rank:
                self.wake(each, now)

    def _next(self) -> VirtualRank:
        """The rank that goes on now. Raises DeadlockError."""
        ready, heap = self.ready, self.heap
        if ready:
            rank = ready.popleft()
            if not ready:
                self.ready_from = _NEVER
            return rank
        while heap:
            now_ns, _, event = heappop(heap)
            following = event.happen(now_ns)
            if following is not None:
                return following
            if ready:
                return self._next()
        raise DeadlockError(self._who_waits())

    # ----------------------------------------------------------------------------------------------------------- deadlock

    def _who_waits(self) -> str:
        """Every waiting rank (the first dozen), and a cycle of ranks that wait for each other."""
        waits = {rank.rank: rank.waiting.describe() for rank in self.ranks if rank.waiting is not None and not rank.greenlet.dead}
        lines = [f"{self._called(rank)} {text}" for rank, (text, _) in waits.items()]
        if len(lines) > 12:
            lines[12:] = [f"... and {len(lines) - 12} more"]
        cycle = _cycle({rank: other for rank, (_, other) in waits.items() if other is not None})
        if cycle:
            lines.append("in a circle: " + " -> ".join(self._called(rank) for rank in cycle))
        return "no virtual rank can go on:\n" + "\n".join(lines)

    def _called(self, rank: int) -> str:
        return f"rank {rank} ({self.name(rank)})"


class _Meeting:
    """Waiting at the barrier."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def describe(self) -> tuple[str, int | None]:
        here = {rank.rank for rank in self._cluster._meeting}
        absent = [rank.rank for rank in self._cluster.ranks if rank.rank not in here]
        return f"is at the barrier, where {len(absent)} ranks are missing", absent[0] if absent else None


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """A cycle in a graph where each rank waits for at most one, its first rank repeated at the end; [] where there is none."""
    done: set[int] = set()
    for start in waits_for:
        path: dict[int, None] = {}
        rank = start
        while rank in waits_for and rank not in done and rank not in path:
            path[rank] = None
            rank = waits_for[rank]
        if rank in path:
            ranks = list(path)
            return [*ranks[ranks.index(rank) :], rank]
        done.update(path)
    return []
