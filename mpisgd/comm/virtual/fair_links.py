"""Messages that share links in turns, as TCP connections do.

Some bytes of each queue at its links; once across, the next queue behind later arrivals. Messages between the same two ranks cross
in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpisgd.comm.virtual.cluster import Event, VirtualRank
from mpisgd.comm.virtual.transfers import IncomingBodies, Receiving

if TYPE_CHECKING:
    from mpisgd.comm.virtual.wire import Sending, VirtualWire


class FairLinks:
    """Messages crossing to a rank; `has_crossed` returns the rank that goes on."""

    def __init__(
        self, wire: VirtualWire, has_crossed: Callable[[Sending, Receiving | IncomingBodies, int], VirtualRank | None]
    ) -> None:
        self.wire = wire
        self._has_crossed = has_crossed
        self._streams: dict[int, deque[Crossing]] = defaultdict(deque)
        """Messages by source; the first crosses."""

    def add(self, message: Sending, incoming: Receiving | IncomingBodies, nbytes: int, now_ns: int) -> None:
        """Let a message cross after its sender's earlier ones; `incoming`: its receive."""
        stream = self._streams[message.source.rank]
        stream.append(Crossing(self, message, incoming, nbytes))
        if len(stream) == 1:
            stream[0].happen(now_ns)

    def has_crossed(self, crossing: Crossing, now_ns: int) -> VirtualRank | None:
        """Begin the next message's turn; return the rank that goes on, or None."""
        stream = self._streams[crossing.message.source.rank]
        stream.popleft()
        if stream:
            stream[0].happen(now_ns)
        return self._has_crossed(crossing.message, crossing.incoming, now_ns)


class Crossing(Event):
    """A crossing message; as an event, its next turn or its end."""

    __slots__ = ("_left", "_turns", "incoming", "message")

    def __init__(self, turns: FairLinks, message: Sending, incoming: Receiving | IncomingBodies, nbytes: int) -> None:
        self.message = message
        self.incoming = incoming
        self._turns = turns
        self._left = nbytes

    def happen(self, now_ns: int) -> VirtualRank | None:
        if self._left == 0:
            return self._turns.has_crossed(self, now_ns)
        source, wire = self.message.source, self._turns.wire
        nbytes = min(self._left, wire.network.turn_nbytes)
        self._left -= nbytes
        wire.cluster.at(wire.network.transfer(source.rank, wire.rank, nbytes, now_ns), source, self)
        return None
