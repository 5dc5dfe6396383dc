"""Virtual ranks in virtual time: greenlets, and one heap of events ordered by (virtual nanoseconds, rank, serial number).

Each rank has a clock of its own. Its code between two blocking calls depends on nothing but what it was sent, so a rank whose
wait is over may run at once, ahead of the others: all it does is send messages into their future. Two things depend on the
order of time, and happen only when no rank can act before them any more (`first_at`): a message becomes visible to a receiver
that takes whatever comes, and a transfer occupies links. Both are events; those of one nanosecond happen in the order of the
ranks that cause them, those of one rank in the order in which it did. So runs repeat exactly, in whatever order ranks got to run.

A rank that cannot go on hands its thread to the next that can. Where there is none, and ranks are left, nothing will ever
happen: `DeadlockError` says who waits for whom.
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
"""Events of one rank: 10^12."""


class Event(ABC):
    """Something that will happen."""

    __slots__ = ()

    @abstractmethod
    def happen(self, now_ns: int) -> VirtualRank | None:
        """Happen, now. Returns a rank that must go on at this very nanosecond, or None."""


class Awaited(ABC):
    """Something that a rank may wait for."""

    __slots__ = ()

    @abstractmethod
    def describe(self) -> tuple[str, int | None]:
        """Describe what a rank does that waits for it, and the rank that would have to act (None = any)."""


class VirtualRank(Event, Clock):
    """A virtual rank: its number, its clock, and the way into its greenlet. As an event, it goes on.

    `order` is that of the event which the rank caused last: ranks first, then their own events in turn.
    """

    __slots__ = ("check", "dead", "now", "order", "rank", "switch", "waiting")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.check: Callable[[], None] | None = None
        """Looks whether what the rank does now is to be given up."""
        self.order = rank << _ORDER_BITS
        self.now = 0
        self.switch: Callable[[], object]
        self.waiting: Awaited | None = None
        self.dead = False

    def happen(self, now_ns: int) -> VirtualRank | None:
        return self

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        meet()

    def now_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.work(round(seconds * 1e9))

    def let_move(self) -> None:
        """Messages move by themselves in virtual time."""

    def hold(self) -> None:
        """They always do."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        self.check = check

    def work(self, ns: int) -> None:
        """Let nanoseconds pass on this rank; `check` is called now and then, between layers or micro-batches, and may end it."""
        if self.check is None:
            self.now += ns
            return
        end_ns = self.now + ns
        for part in range(_CHECKS):
            self.now += (end_ns - self.now) // (_CHECKS - part)
            self.check()


class Cluster:
    """All ranks of a virtual cluster.

    Args:
        name: what a rank is called in messages: `"learner 3"`.

    Attributes:
        ready: ranks whose waits are over; each goes on when the running one waits.
        heap: (virtual nanosecond, order, event) of all that will happen; the last entry is that nothing does any more.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self.name = name
        self.ranks: Sequence[VirtualRank] = ()
        self.ready: list[VirtualRank] = []
        self.heap: list[tuple[int, int, Event]] = [(NEVER, 0, _Nothing(self))]
        self._everybody: Meeting

    def run(self, ranks: Sequence[VirtualRank], mains: Sequence[Callable[[], None]]) -> None:
        """Run one main for each rank until all have returned.

        Raises what a main raised, or DeadlockError.
        """
        self.ranks = ranks
        self._everybody = Meeting(self, range(len(ranks)))
        here = VirtualRank(-1)
        here.switch = getcurrent().switch
        for rank, main in zip(ranks, mains, strict=True):  # each from here: one begun by another would stand on its stack
            self.ready.insert(0, here)  # so nothing happens before all have begun
            rank.switch = greenlet(self._live(rank, main)).switch
            rank.switch()
            if here in self.ready:  # the rank has returned
                self.ready.remove(here)
        alive = sum(not rank.dead for rank in ranks)
        for _ in range(alive):  # a rank comes back here only when it has returned; waiting ones switch to each other
            self.block(here, None)

    @staticmethod
    def _live(rank: VirtualRank, main: Callable[[], None]) -> Callable[[], None]:
        def live() -> None:
            main()
            rank.dead = True

        return live

    # -------------------------------------------------------------------------------------------------------- scheduling

    def at(self, time_ns: int, cause: VirtualRank, event: Event) -> None:
        """Let an event happen at `time_ns`."""
        cause.order += 1
        heappush(self.heap, (time_ns, cause.order, event))

    def first_at(self, time_ns: int) -> bool:
        """Whether nothing can happen before `time_ns`, or at it but earlier in order, but what the running rank does."""
        return not self.ready and time_ns < self.heap[0][0]

    def block(self, rank: VirtualRank, waiting: Awaited | None) -> None:
        """The running rank waits; others run until it is ready, or an event lets it go on. Raises DeadlockError where none can."""
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
        """Let everything happen that comes before the running rank's clock, or at it but earlier in order."""
        if self.ready or rank.now >= self.heap[0][0]:
            self.at(rank.now, rank, rank)
            self.block(rank, None)

    def meet(self, rank: VirtualRank) -> None:
        """A barrier of all ranks."""
        self._everybody.join(rank)

    # ----------------------------------------------------------------------------------------------------------- deadlock

    def who_waits(self) -> str:
        """Every waiting rank (the first dozen), and a cycle of ranks that wait for each other."""
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
    """The last event of all: no rank can go on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def happen(self, now_ns: int) -> VirtualRank | None:
        heappush(self._cluster.heap, (NEVER, 0, self))  # other ranks may find the same
        raise DeadlockError(self._cluster.who_waits())


class Meeting(Awaited):
    """A barrier of some ranks, as often as they come.

    Args:
        ranks: who meets.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._here: list[VirtualRank] = []

    def join(self, rank: VirtualRank) -> None:
        """The running rank waits until all are here; then all have the clock of the last."""
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
