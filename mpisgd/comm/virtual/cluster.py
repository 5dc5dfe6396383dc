"""Virtual ranks in virtual time: greenlets, and a heap of events ordered by (virtual nanoseconds, rank, serial number).

Between blocking calls a rank's code depends only on received messages, so a rank may run ahead: it only sends messages into the
others' future. Two things depend on time's order: when a message becomes visible to a receiver that takes anything, and when a
transfer occupies links. Both are events, and happen once no rank can act before them (`first_at`).

A waiting rank hands its thread to the next that can go on; if none can, `DeadlockError` says who waits for whom.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from greenlet import getcurrent, greenlet

from mpisgd.base.errors import DeadlockError
from mpisgd.comm.communicator import Clock

NEVER = 1 << 61
_CHECKS = 16
_ORDER_BITS = 40
"""Room for 10^12 events of a rank."""


class Event(ABC):
    __slots__ = ()

    @abstractmethod
    def happen(self, now_ns: int) -> VirtualRank | None:
        """Happen now; return a rank that must go on at this very nanosecond, or None."""


class Waitable(ABC):
    __slots__ = ()

    @abstractmethod
    def describe(self) -> tuple[str, int | None]:
        """Describe a rank's wait, and the rank that must act (None = any)."""


class VirtualRank(Event, Clock):
    """A virtual rank; as an event, it goes on. `order`: of the event caused last."""

    __slots__ = ("check", "dead", "now", "order", "rank", "send", "switch", "waiting")

    calls = True

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.check: Callable[[], None] | None = None
        """Check that may raise to end the rank's work."""
        self.send: Callable[[], None] | None = None
        """Called during work."""
        self.order = rank << _ORDER_BITS
        self.now = 0
        self.switch: Callable[[], object]
        self.waiting: Waitable | None = None
        self.dead = False

    def happen(self, now_ns: int) -> VirtualRank | None:
        return self

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        meet()

    def now_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.work(round(seconds * 1e9))

    def let_move(self, send: Callable[[], None] | None = None) -> None:
        """Call `send` during work; messages move by themselves."""
        self.send = send

    def hold(self) -> None:
        self.send = None

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        self.check = check

    def work(self, ns: int) -> None:
        """Let nanoseconds pass; call `check`, which may raise, or `send`, as between layers or micro-batches."""
        check = self.check or self.send
        if check is None:
            self.now += ns
            return
        end_ns = self.now + ns
        for part in range(_CHECKS):
            self.now += (end_ns - self.now) // (_CHECKS - part)
            check()


class Cluster:
    """All virtual ranks.

    Args:
        name: a rank's name in messages: `"learner 3"`.

    Attributes:
        ready: ranks with finished waits, which go on when the running rank waits.
        heap: (virtual nanosecond, order, event); last, that nothing happens any more.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self.name = name
        self.ranks: Sequence[VirtualRank] = ()
        self.ready: list[VirtualRank] = []
        self.heap: list[tuple[int, int, Event]] = [(NEVER, 0, _Nothing(self))]
        self._everybody: Meeting

    def run(self, ranks: Sequence[VirtualRank], mains: Sequence[Callable[[], None]]) -> None:
        """Run a main for each rank. Raises a main's error, or DeadlockError."""
        self.ranks = ranks
        self._everybody = Meeting(self, range(len(ranks)))
        here = VirtualRank(-1)
        here.switch = getcurrent().switch
        for rank, main in zip(ranks, mains, strict=True):  # each from here: begun by another, it would stand on its stack
            self.ready.insert(0, here)  # so nothing happens before all have begun
            rank.switch = greenlet(self._live(rank, main)).switch
            rank.switch()
            if here in self.ready:  # the rank has returned
                self.ready.remove(here)
        alive = sum(not rank.dead for rank in ranks)
        for _ in range(alive):  # only returned ranks come back here; waiting ranks switch to each other
            self.block(here, None)

    @staticmethod
    def _live(rank: VirtualRank, main: Callable[[], None]) -> Callable[[], None]:
        def live() -> None:
            main()
            rank.dead = True

        return live

    # -------------------------------------------------------------------------------------------------------- scheduling

    def at(self, time_ns: int, cause: VirtualRank, event: Event) -> None:
        cause.order += 1
        heappush(self.heap, (time_ns, cause.order, event))

    def first_at(self, time_ns: int) -> bool:
        """Return whether nothing else can happen before `time_ns`, in time and order."""
        return not self.ready and time_ns < self.heap[0][0]

    def block(self, rank: VirtualRank, waiting: Waitable | None) -> None:
        """Let others run until the running rank can go on. Raises DeadlockError: none can."""
        rank.waiting, ready = waiting, self.ready
        following = ready.pop() if ready else None
        while following is None:
            now_ns, _, event = heappop(self.heap)
            following = event.happen(now_ns)
            if following is None and ready:
                following = ready.pop()
        if following is not rank:
            following.switch()

    def until_first(self, rank: VirtualRank) -> None:
        """Let all happen that comes before the running rank, in time and order."""
        if self.ready or rank.now >= self.heap[0][0]:
            self.at(rank.now, rank, rank)
            self.block(rank, None)

    def meet(self, rank: VirtualRank) -> None:
        self._everybody.join(rank)

    # ----------------------------------------------------------------------------------------------------------- deadlock

    def who_waits(self) -> str:
        waits = {rank.rank: rank.waiting.describe() for rank in self.ranks if rank.waiting is not None and not rank.dead}
        lines = [f"{self._called(rank)} {text}" for rank, (text, _) in waits.items()]
        if len(lines) > 12:
            lines[12:] = [f"... and {len(lines) - 12} more"]
        cycle = _cycle({rank: other for rank, (_, other) in waits.items() if other is not None})
        if cycle:
            lines.append("in a circle: " + " -> ".join(self._called(rank) for rank in cycle))
        return "no virtual rank can go on:\n" + "\n".join(lines)

    def _called(self, rank: int) -> str:
        return f"rank {rank} ({self.name(rank)})"


class _Nothing(Event):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def happen(self, now_ns: int) -> VirtualRank | None:
        heappush(self._cluster.heap, (NEVER, 0, self))  # other ranks may find the same
        raise DeadlockError(self._cluster.who_waits())


class Meeting(Waitable):
    def __init__(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._here: list[VirtualRank] = []

    def join(self, rank: VirtualRank) -> None:
        """Wait for all; set clocks to the latest."""
        here = self._here
        here.append(rank)
        if len(here) < len(self._ranks):
            self._cluster.block(rank, self)
            return
        self._here = []
        now = max(each.now for each in here)
        for each in here:
            each.now = now
            if each is not rank:
                self._cluster.ready.append(each)

    def describe(self) -> tuple[str, int | None]:
        here = {rank.rank for rank in self._here}
        absent = [rank for rank in self._ranks if rank not in here]
        return f"is at the barrier, where {len(absent)} ranks are missing", absent[0] if absent else None


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Return a cycle of waits, its first rank repeated at the end; [] = none."""
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
