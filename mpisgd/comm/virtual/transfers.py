"""What else is under way in virtual time: receives that were posted, messages whose bodies are being made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Awaited

if TYPE_CHECKING:
    from mpisgd.comm.virtual.wire import VirtualWire


class Receiving(Awaited):
    """A receive that was posted; to be waited for."""

    __slots__ = ("begun", "bodies", "end", "fields", "posted", "source", "tag", "wire")

    def __init__(self, wire: VirtualWire, source: int, tag: int, bodies: tuple[Any, ...]) -> None:
        self.wire = wire
        self.source = source
        self.tag = tag
        self.bodies = bodies
        self.posted = wire.now
        self.fields: Fields
        self.begun = self.end = -1
        """Nanoseconds at which the header was there, and all of it; -1 = not yet known."""

    def arrived(self) -> bool:
        self.wire.cluster.until_first(self.wire)
        return 0 <= self.begun <= self.wire.now

    def withdraw(self) -> None:
        """Nothing is lost by a receive that stays posted."""

    def describe(self) -> tuple[str, int | None]:
        return f"waits for {Tag(self.tag).name} of rank {self.source}", self.source


class Coming:
    """A body that is received while other messages are taken; whole at nanosecond `end`."""

    __slots__ = ("_wire", "checked", "end")

    def __init__(self, wire: VirtualWire, end: int) -> None:
        self._wire = wire
        self.end = end
        self.checked = False

    def __lt__(self, other: Coming) -> bool:
        """Whether it is whole before another."""
        return self.end < other.end

    def is_whole(self) -> bool:
        return self.end <= self._wire.now

    def check(self) -> None:
        """It is as it should be, and nobody waits for it any more."""
        self.checked = True


class Opened:
    """A message whose bodies are still being made; that takes no virtual time: they leave together, when it is closed."""

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
