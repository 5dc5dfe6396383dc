"""More under way in virtual time: receives, messages still being made, alarms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Event, VirtualRank, Waitable

if TYPE_CHECKING:
    from mpisgd.comm.virtual.wire import Sending, VirtualWire


class Receiving(Waitable):
    __slots__ = ("begun", "bodies", "end", "fields", "posted", "source", "tag", "wire")

    def __init__(self, wire: VirtualWire, source: int, tag: int, bodies: tuple[Any, ...]) -> None:
        self.wire = wire
        self.source = source
        self.tag = tag
        self.bodies = bodies
        self.posted = wire.now
        self.fields: Fields
        self.begun = self.end = -1
        """Nanoseconds at which the header, and all, was there; -1 = not yet known."""

    def arrived(self) -> bool:
        self.wire.cluster.until_first(self.wire)
        return self.wire.interruptible and 0 <= self.begun <= self.wire.now

    def withdraw(self) -> None:
        """Do nothing: a posted receive may stay."""

    def describe(self) -> tuple[str, int | None]:
        return f"waits for {Tag(self.tag).name} of rank {self.source}", self.source


class Alarm(Event):
    """The end of a wait."""

    __slots__ = ("_rank", "_stops_waiting", "over")

    def __init__(self, rank: VirtualRank, stops_waiting: Callable[[int], bool]) -> None:
        self._rank = rank
        self._stops_waiting = stops_waiting
        self.over = False

    def happen(self, now_ns: int) -> VirtualRank | None:
        if self.over or not self._stops_waiting(now_ns):
            return None
        self.over = True
        return self._rank


class IncomingBodies(Waitable):
    """A body received beside other messages; whole at nanosecond `end`, -1 = not yet known."""

    __slots__ = ("_wire", "checked", "end", "source")

    def __init__(self, wire: VirtualWire, source: int) -> None:
        self._wire = wire
        self.source = source
        self.end = -1
        self.checked = False

    def __lt__(self, other: IncomingBodies) -> bool:
        return self.end < other.end

    def is_whole(self) -> bool:
        return 0 <= self.end <= self._wire.now

    def describe(self) -> tuple[str, int | None]:
        return f"waits for a body of rank {self.source}", self.source

    def check(self) -> None:
        self.checked = True


class OpenMessage:
    __slots__ = ("_bodies", "_dest", "_fields", "_tag", "_wire")

    def __init__(self, wire: VirtualWire, dest: int, tag: int, fields: Fields) -> None:
        self._wire = wire
        self._dest = dest
        self._tag = tag
        self._fields = fields
        self._bodies: list[Any] = []

    def add(self, body: Any) -> None:
        self._bodies.append(body)

    def close(self) -> Any:
        return self._wire.start(self._dest, self._tag, self._fields, *self._bodies)


class Beginning(Event):
    """A matched message; as an event, its bytes begin to cross."""

    __slots__ = ("_let_cross", "_message", "_receiving")

    def __init__(self, let_cross: Callable[[Sending, Receiving, int], None], message: Sending, receiving: Receiving) -> None:
        self._let_cross = let_cross
        self._message = message
        self._receiving = receiving

    def happen(self, now_ns: int) -> VirtualRank | None:
        self._let_cross(self._message, self._receiving, now_ns)
        return None
