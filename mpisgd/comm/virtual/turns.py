"""Messages that cross the links in turns: those that are under way at once share a link, as connections of TCP do.

Some bytes of each queue at its links, and when they have crossed, the next ones queue again, behind what has come meanwhile. From
one rank to another there is one connection: its messages cross one after the other. Where all of a message queues at once, who is
first has all of a link; where links are shared, a learner that is late also slows down one that is not, and falls behind further.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpisgd.comm.virtual.cluster import Event, VirtualRank
from mpisgd.comm.virtual.transfers import Coming, Receiving

if TYPE_CHECKING:
    from mpisgd.comm.virtual.wire import Sending, VirtualWire


class Turns:
    """What crosses to one rank.

    Args:
        has_crossed: is told of a message whose last bytes are there, at which nanosecond; returns the rank that must go on.
    """

    def __init__(self, wire: VirtualWire, has_crossed: Callable[[Sending, Receiving | Coming, int], VirtualRank | None]) -> None:
        self.wire = wire
        self._has_crossed = has_crossed
        self._streams: dict[int, deque[Crossing]] = defaultdict(deque)
        """By source: the first one crosses."""

    def add(self, message: Sending, incoming: Receiving | Coming, nbytes: int, now_ns: int) -> None:
        """A message begins to cross, or will when those before it have; `incoming` is what it is received by."""
        stream = self._streams[message.source.rank]
        stream.append(Crossing(self, message, incoming, nbytes))
        if len(stream) == 1:
            stream[0].happen(now_ns)

    def has_crossed(self, crossing: Crossing, now_ns: int) -> VirtualRank | None:
        """It is another message's turn. Returns the rank that goes on with this one, or None."""
        stream = self._streams[crossing.message.source.rank]
        stream.popleft()
        if stream:
            stream[0].happen(now_ns)
        return self._has_crossed(crossing.message, crossing.incoming, now_ns)


class Crossing(Event):
    """A message that crosses; as an event, it is its turn, or all of it is there."""

    __slots__ = ("_left", "_turns", "incoming", "message")

    def __init__(self, turns: Turns, message: Sending, incoming: Receiving | Coming, nbytes: int) -> None:
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
