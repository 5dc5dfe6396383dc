"""Wire of a virtual rank that takes messages in a given order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mpisgd.comm.communicator import Pattern
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import Sending, VirtualWire

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

    @abstractmethod
    def describe(self) -> tuple[str, int | None]:
        """Describe the wait for the next message, and its sender."""


class EagerWire(VirtualWire):
    """Wire of a rank that meets scripted ranks: sends need no receive."""

    __slots__ = ()

    interruptible = False

    def work(self, ns: int) -> None:
        """Compute in no time."""

    def meet(self) -> None:
        """Do nothing: lost ranks do not come."""

    def finish(self, transfer: Any) -> bool:
        if isinstance(transfer, Sending) and transfer.end < 0:
            transfer.keep()
            return True
        return super().finish(transfer)


class ScriptedWire(VirtualWire):
    __slots__ = ("_script",)

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire], script: Script) -> None:
        super().__init__(cluster, network, wires)
        self._script = script

    def meet(self) -> None:
        """Do nothing: lost ranks do not come."""

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Take the script's next message, whatever the time; nothing, where asked for pulls beside an update."""
        if patterns == _PULLS:
            return None
        if until_ns is not None and self._script.time_out():
            self.now = max(self.now, until_ns)
            return None
        if (told := self._script.told()) is not None:
            return told
        for _ in range(_SILENCES):  # other ranks may let in messages first
            silent_ns = self.now + _SILENCE_NS
            while self.now < silent_ns:
                if (taken := super().take(_BY_SCRIPT, silent_ns)) is not None:
                    return taken
            self._script.relax(self._arrived)
        return super().take(_BY_SCRIPT)

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
