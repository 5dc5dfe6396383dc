"""Wire of a virtual rank that takes messages in a given order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappush
from typing import Any

from mpisgd.comm.communicator import Pattern
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Cluster, Waitable
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import Sending, VirtualWire
from mpisgd.vectors.memory import copy_into, copy_of

Arrived = Mapping[int, deque[Sending]]
"""Messages by tag, in the order of arrival."""

_BY_SCRIPT: tuple[Pattern, ...] = ((None, -1),)
_PULLS: tuple[Pattern, ...] = ((None, Tag.PULL),)
_SILENCE_NS = 10**15
"""Time in which nothing has come anywhere: all ranks wait for one another."""
_SILENCES = 64


class Script(ABC):
    """Order of a rank's messages."""

    @abstractmethod
    def time_out(self) -> bool:
        """Return whether no message is next; go on behind a time-out."""

    @abstractmethod
    def told(self) -> tuple[int, int, Fields] | None:
        """Return the next message, if no rank sends it here; go on behind it."""

    @abstractmethod
    def find(self, arrived: Arrived) -> Sending | None:
        """Return the next message, if arrived, and go on behind it."""

    @abstractmethod
    def relax(self, arrived: Arrived) -> None:
        """Let in a message that the script does not have: all ranks wait."""

    @property
    @abstractmethod
    def torn(self) -> bool:
        """Only a part of the last message came."""

    @property
    @abstractmethod
    def pulls_first(self) -> bool:
        """Messages on the way come before the next event."""

    @abstractmethod
    def hears(self, arrived: Arrived) -> bool:
        """Return whether a message has arrived that goes before the script."""

    @abstractmethod
    def wanted(self) -> Sequence[int]:
        """Return the ranks of which the next message may be."""

    @abstractmethod
    def describe(self) -> tuple[str, int | None]:
        """Describe the wait for the next message, and its sender."""


class _Turn(Waitable):
    """The wait of a rank that no script wants."""

    __slots__ = ()

    def describe(self) -> tuple[str, int | None]:
        return "waits until its message is wanted", None


_TURN = _Turn()


class EagerWire(VirtualWire):
    """Wire of a rank that meets scripted ranks: sends need no receive.

    `late`: weights come into place, and the rank computes, when a script wants its message.
    """

    __slots__ = ("_kept", "_late", "_sent", "_wanted")

    interruptible = False

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire], *, late: bool = False) -> None:
        super().__init__(cluster, network, wires)
        self._late = late
        self._wanted = False
        self._kept: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        """Rooms for weights, and the weights."""
        self._sent: dict[tuple[int, int], Sending] = {}
        """Last message under way, by destination and tag; pushes wait for a script."""

    def let(self, now_ns: int) -> None:
        """Let the rank compute."""
        if not self._wanted:
            self._wanted = True
            if self.waiting is _TURN:
                self.now = max(self.now, now_ns)
                self.cluster.ready.append(self)

    def await_turn(self) -> None:
        """Wait until a script wants a message of this rank; put weights into place."""
        while self._late and not self._wanted:
            self.cluster.block(self, _TURN)
        for rooms, bodies in self._kept:
            for room, body in zip(rooms, bodies, strict=True):
                copy_into(room[: len(body)], body)
        self._kept.clear()

    def work(self, ns: int) -> None:
        """Compute in no time."""

    def meet(self) -> None:
        """Do nothing: lost ranks do not come."""

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        """Send a message, behind others of this tag."""
        before = self._sent.pop((dest, tag), None)
        if before is None or before.end >= 0:
            message: Sending = super().start(dest, tag, fields, *bodies)
        else:
            self.order += 1
            message = Sending(self, self._wires[dest], tag, fields, bodies, max(self.now, before.arrival))
            heappush(self.cluster.heap, (message.arrival, self.order, message))
        if tag != Tag.PUSH:
            self._sent[dest, tag] = message
        return message

    def finish(self, transfer: Any) -> bool:
        if isinstance(transfer, Sending):
            if transfer.tag == Tag.PUSH:
                self._wanted = False
            if transfer.end < 0:
                transfer.keep()
                return True
        return super().finish(transfer)

    def _transfer(self, message: Sending, bodies: tuple[Any, ...], now_ns: int, incoming: Any) -> int:
        if self._late and message.tag == Tag.ANSWER:
            self._kept.append((bodies, message.bodies))
            return now_ns
        return super()._transfer(message, bodies, now_ns, incoming)


class ScriptedWire(VirtualWire):
    """Wire of a rank with a script; `eager`: of the others."""

    __slots__ = ("_eager", "_late", "_script", "_served")

    def __init__(
        self,
        cluster: Cluster,
        network: Network,
        wires: list[VirtualWire],
        script: Script,
        eager: Mapping[int, EagerWire],
        *,
        late: bool = False,
    ) -> None:
        super().__init__(cluster, network, wires)
        self._script = script
        self._eager = eager
        self._late = late
        self._served: tuple[int, tuple[Any, ...]] = (-1, ())

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        """Send a message; to late learners a copy of the weights, one for each clock."""
        if self._late and tag == Tag.ANSWER and bodies:
            clock = fields[1]
            if self._served[0] != clock:
                self._served = clock, tuple(map(copy_of, bodies))
            bodies = self._served[1]
        return super().start(dest, tag, fields, *bodies)

    def meet(self) -> None:
        """Do nothing: lost ranks do not come."""

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Take the script's next message, whatever the time; nothing, where asked for pulls beside an update."""
        if patterns == _PULLS:
            return None
        if self._script.pulls_first and (taken := self._take_by_silence()) is not None:
            return taken
        if until_ns is not None and self._script.time_out():
            self.now = max(self.now, until_ns)
            return None
        if not self._script.hears(self._arrived) and (told := self._script.told()) is not None:
            return told
        for rank in self._script.wanted():
            self._eager[rank].let(self.now)
        for _ in range(_SILENCES):  # other ranks may let in messages first
            if (taken := self._take_by_silence()) is not None:
                return taken
            self._script.relax(self._arrived)
        return super().take(_BY_SCRIPT)

    def _take_by_silence(self) -> tuple[int, int, Fields] | None:
        """Take the script's next message, or None once all ranks wait."""
        silent_ns = self.now + _SILENCE_NS
        while self.now < silent_ns:
            if (taken := super().take(_BY_SCRIPT, silent_ns)) is not None:
                return taken
        return None

    def take_body(self, *bodies: Any) -> bool:
        return super().take_body(*bodies) and not self._script.torn

    def _look(self, patterns: tuple[Pattern, ...]) -> Sending | None:
        if patterns is not _BY_SCRIPT:
            return super()._look(patterns)
        if (found := self._script.find(self._arrived)) is not None:
            self._arrived[found.tag].remove(found)
            self._waiting -= 1
        return found

    def describe(self) -> tuple[str, int | None]:
        return self._script.describe() if self._patterns is _BY_SCRIPT else super().describe()
