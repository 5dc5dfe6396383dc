"""What else is under way in virtual time: receives that were posted, messages whose bodies are being made, alarms."""

from __future__ import annotations

from typing import Any

from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Event, VirtualRank


class Waits(VirtualRank):
    """A rank that may wait until a time."""

    __slots__ = ()

    def stops_waiting(self, now_ns: int) -> bool:
        """The time is over; False where what it waited for has come."""
        raise NotImplementedError


class Receiving(Event):
    """A receive that was posted; to be waited for."""

    __slots__ = ("begun", "bodies", "end", "fields", "posted", "source", "tag", "waiter")

    def __init__(self, source: int, tag: int, bodies: tuple[Any, ...], posted: int) -> None:
        self.source = source
        self.tag = tag
        self.bodies = bodies
        self.posted = posted
        self.fields: Fields = ()
        self.begun = self.end = -1
        """Nanoseconds at which the header was there, and all of it; -1 = not yet known."""
        self.waiter: VirtualRank | None = None

    def describe(self) -> tuple[str, int | None]:
        return f"waits for {Tag(self.tag).name} of rank {self.source}", self.source


class Opened:
    """A message whose bodies are still being made."""

    __slots__ = ("bodies", "dest", "fields", "tag")

    def __init__(self, dest: int, tag: int, fields: Fields) -> None:
        self.dest = dest
        self.tag = tag
        self.fields = fields
        self.bodies: list[Any] = []


class Alarm(Event):
    """The time at which a rank waits no longer, if it still does."""

    __slots__ = ("over", "wire")

    def __init__(self, wire: Waits) -> None:
        self.wire = wire
        self.over = False

    def happen(self, now_ns: int) -> VirtualRank | None:
        if self.over or not self.wire.stops_waiting(now_ns):
            return None
        self.over = True
        return self.wire
