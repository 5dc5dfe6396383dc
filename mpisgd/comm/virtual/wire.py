"""Communicator of a virtual rank, without MPI.

Sends block as `MPI_Ssend`, until a receive is there and the bytes are transferred. Nothing is ever buffered: a deadlock with
rendezvous sends is a deadlock here (law 1).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Clock, Communicator, Pattern
from mpisgd.comm.messages import LAYOUTS, Fields, Tag
from mpisgd.comm.presence import Presence
from mpisgd.comm.virtual.cluster import NEVER, Cluster, Event, Meeting, VirtualRank, Waitable
from mpisgd.comm.virtual.collectives import VirtualSegment, VirtualTeam
from mpisgd.comm.virtual.fair_links import FairLinks
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.transfers import Alarm, Beginning, IncomingBodies, OpenMessage, Receiving
from mpisgd.vectors.memory import SizedVector, copy_into, copy_of

_ANYTHING = (None, None)
_PART = Tag.PART  # spares a look into the enumeration for each message
_LANDED = (-1, 0)
_ALL = Presence()
"""No rank hangs or dies here."""


class Sending(Event, Waitable):
    """A message under way. As an event, it arrives."""

    __slots__ = ("arrival", "bodies", "dest", "end", "fields", "source", "tag")

    def __init__(
        self, source: VirtualWire, dest: VirtualWire, tag: int, fields: Fields, bodies: tuple[Any, ...], arrival: int
    ) -> None:
        self.source = source
        self.dest = dest
        self.tag = tag
        self.fields = fields
        self.bodies = bodies
        self.arrival = arrival
        self.end = -1
        """Nanosecond of the end; -1 = not yet known."""

    def keep(self) -> None:
        """Copy the bodies: the sender goes on."""
        self.bodies = tuple(map(copy_of, self.bodies))

    def happen(self, now_ns: int) -> VirtualRank | None:
        """Meet the posted receive, or wait to be taken; return the receiver if it goes on."""
        wire = self.dest
        if wire._posted and wire._meets_posted(self):
            return None
        patterns, busy = wire._patterns, now_ns < wire.now
        wire._patterns = None
        if patterns is not None and patterns[-1] == _ANYTHING and not (busy and not wire.cluster.first_at(wire.now)):
            wire._handed = self  # nothing else is here
        else:
            wire._arrived[self.tag].append(self)
            wire._waiting += 1
            if patterns is None:
                return None
            if busy:  # later arrivals may go first
                wire.cluster.at(wire.now, wire, wire)
                return None
        if not busy:
            wire.now = now_ns
        return wire

    def has_left(self) -> bool:
        self.source.cluster.until_first(self.source)
        return 0 <= self.end <= self.source.now

    def describe(self) -> tuple[str, int | None]:
        dest = self.dest.rank
        return f"sends {Tag(self.tag).name} to rank {dest}, but rank {dest} has posted no receive", dest


class Signal(Event):
    """A signal that tells a rank to end; with `takes`, as a message."""

    __slots__ = ("number", "takes", "wire")

    def __init__(self, wire: VirtualWire, number: int, takes: bool) -> None:
        self.wire = wire
        self.number = number
        self.takes = takes

    def happen(self, now_ns: int) -> VirtualRank | None:
        wire = self.wire
        wire.signal = self.number
        if not self.takes or wire.deaf:
            return None
        return Sending(wire, wire, Tag.INTERRUPT, (self.number,), (), now_ns).happen(now_ns)


class VirtualWire(VirtualRank, Waitable, Communicator):
    __slots__ = (
        "_alarm",
        "_arrived",
        "_coming",
        "_handed",
        "_heap",
        "_latency_ns",
        "_overhead_ns",
        "_parts",
        "_patterns",
        "_posted",
        "_ready",
        "_segment",
        "_taken",
        "_turns",
        "_waiting",
        "_wires",
        "cluster",
        "deaf",
        "network",
        "nodes",
        "presence",
        "signal",
    )

    interruptible = True
    """Learners hear notices while computing."""

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire]) -> None:
        """Add the next rank to the cluster's `wires`."""
        super().__init__(len(wires))
        self.cluster = cluster
        self._heap, self._ready = cluster.heap, cluster.ready
        self.network = network
        self.nodes = network.nodes
        self._wires = wires
        self._arrived: dict[int, deque[Sending]] = defaultdict(deque)
        self._waiting = 0
        self._coming: list[IncomingBodies] = []
        """Heap of bodies with known end, first whole first; may hold checked ones."""
        self._posted: list[Receiving] = []
        """A handful: a search is faster than keys."""
        self._parts: dict[int, tuple[int, int]] = {}
        """Arrival of the last part to each rank: later parts follow."""
        self._patterns: tuple[Pattern, ...] | None = None  # of a waiting `take`
        self._alarm: Alarm | None = None  # of a `take` beside bodies
        self._taken: Sending
        self._handed: Sending | None = None
        self._segment: tuple[Meeting, list[np.ndarray]] | None = None
        self.presence = _ALL
        self.signal = 0
        self.deaf = False
        self._turns = FairLinks(self, self._has_crossed) if network.turn_nbytes else None
        self._latency_ns = network.latency_ns
        self._overhead_ns = network.overhead_ns
        wires.append(self)

    # ----------------------------------------------------------------------------------------------------------- together

    @property
    def clock(self) -> Clock:
        return self

    def meet(self) -> None:
        self.cluster.meet(self)

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], cuts: Sequence[tuple[int, int]] = ()) -> VirtualTeam:
        return VirtualTeam(self, self._post, ranks, bounds, cuts)

    def segment(self, ranks: Sequence[int], sizes: Sequence[int]) -> VirtualSegment:
        first = self._wires[ranks[0]]
        if first._segment is None:
            first._segment = Meeting(self.cluster, ranks), [np.zeros(nbytes, np.uint8) for nbytes in sizes]
        return VirtualSegment(self, *first._segment, ranks.index(self.rank))

    # --------------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        self.now = now = self.now + self._overhead_ns
        message = Sending(self, self._wires[dest], tag, fields, bodies, now + self._latency_ns)
        overtakes = tag == _PART and self._parts.get(dest, _LANDED) >= self._heap[0][:2]
        if overtakes or not (message.dest._posted and message.dest._meets_posted(message)):
            self.order = order = self.order + 1
            heappush(self._heap, (message.arrival, order, message))
            if tag == _PART:
                self._parts[dest] = message.arrival, order
        return message

    def aside(self, body: Any) -> Any:
        """Return the body: each virtual rank has its own core."""
        return body

    def open(self, dest: int, tag: int, fields: Fields) -> Any:
        """Open a message; its bodies, made in no virtual time, leave at `close`."""
        return OpenMessage(self, dest, tag, fields)

    def finish(self, transfer: Any) -> bool:
        while transfer.end < 0:  # again, if woken for the header
            self.cluster.block(self, transfer)
        if transfer.end > self.now:
            self.now = transfer.end
        return True

    # ------------------------------------------------------------------------------------------------------------ receive

    def post(self, source: int, tag: int, *bodies: Any) -> Any:
        if tag in LAYOUTS:
            return self._post(source, tag, bodies)
        coming = IncomingBodies(self, self._taken.source.rank)
        coming.end = self._begin_taken(bodies, coming)
        if coming.end >= 0:
            heappush(self._coming, coming)
        return coming

    def _post(self, source: int, tag: int, bodies: tuple[Any, ...]) -> Receiving:
        receiving = Receiving(self, source, tag, bodies)
        if self._waiting and (arrived := self._arrived[tag]):
            for message in arrived:
                if message.source.rank == source:
                    arrived.remove(message)
                    self._waiting -= 1
                    self._match(message, receiving)
                    return receiving
        self._posted.append(receiving)
        return receiving

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, bodies: tuple[Any, ...] = ()) -> Any:
        answer = self._post(dest, answer_tag, bodies)
        self.start(dest, tag, fields)  # taken before answered: nothing more to wait for
        return answer

    def header(self, posted: Any) -> Fields:
        if posted.begun < 0:
            self.cluster.block(self, posted)
        if posted.begun > self.now:
            self.now = posted.begun
        fields: Fields = posted.fields
        return fields

    def header_or_signal(self, posted: Any) -> None:
        """Wait for the header, with which a signal is heard, too."""
        self.header(posted)

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        message: Sending | None = None
        alarm: Alarm | None = None
        if self._waiting or coming or until_ns is not None:
            if self._ready or self.now >= self._heap[0][0]:
                self.cluster.until_first(self)
            message = self._look(patterns)
        if message is None and (coming or until_ns is not None):
            alarm = self._wait_until(until_ns, coming)
        while message is None:
            if alarm is not None and alarm.over:
                return None
            self._patterns = patterns
            self.cluster.block(self, self)
            message = self._handed or self._look(patterns)
        if alarm is not None:
            alarm.over = True
        self._handed, self._taken, source = None, message, message.source
        self.now = now_ns = self.now + self._overhead_ns
        if not message.bodies:
            message.end = now_ns
            if source.waiting is message:
                self._ready.append(source)
        return source.rank, message.tag, message.fields

    def _wait_until(self, until_ns: int | None, coming: Sequence[Any]) -> Alarm:
        alarm = Alarm(self, self._stops_waiting)
        self._alarm = alarm if coming else None
        first_ns = self._first_whole_ns() if coming else NEVER
        if until_ns is not None and until_ns < first_ns:
            first_ns = until_ns
        if first_ns < NEVER:
            self.cluster.at(max(self.now, first_ns), self, alarm)
        return alarm

    def _first_whole_ns(self) -> int:
        coming = self._coming
        while coming and coming[0].checked:
            heappop(coming)
        return coming[0].end if coming else NEVER

    def _goes_on(self, now_ns: int) -> None:
        self._patterns = None
        if now_ns > self.now:
            self.now = now_ns

    def _stops_waiting(self, now_ns: int) -> bool:
        if self._patterns is None:
            return False
        self._goes_on(now_ns)
        return True

    def take_body(self, *bodies: Any) -> bool:
        if self._turns is not None:
            return self.finish(self.post(self._taken.source.rank, Tag.GRADIENT, *bodies))
        self.now = self._begin_taken(bodies)
        return True

    def _begin_taken(self, bodies: tuple[Any, ...], coming: IncomingBodies | None = None) -> int:
        """Begin the last message's bodies; return when all is there, -1 = not yet known."""
        if self._ready or self.now >= self._heap[0][0]:
            self.cluster.until_first(self)
        message = self._taken
        message.end = end_ns = self._transfer(message, bodies, self.now, coming)
        if end_ns >= 0 and message.source.waiting is message:
            self._ready.append(message.source)
        return end_ns

    def _look(self, patterns: tuple[Pattern, ...]) -> Sending | None:
        arrived = self._arrived
        for source, tag in patterns:
            if source is None and tag is not None:
                if queue := arrived[tag]:
                    self._waiting -= 1
                    return queue.popleft()
                continue
            found: Sending | None = None
            for queue in arrived.values() if tag is None else (arrived[tag],):
                for message in queue:
                    if source is None or message.source.rank == source:
                        if found is None or message.arrival < found.arrival:
                            found = message
                        break
            if found is not None:
                arrived[found.tag].remove(found)
                self._waiting -= 1
                return found
        return None

    def describe(self) -> tuple[str, int | None]:
        patterns = self._patterns or ()
        sources = {source for source, _ in patterns}
        wanted = " or ".join("anything" if tag is None else Tag(tag).name for _, tag in patterns)
        return f"waits for {wanted}", sources.pop() if len(sources) == 1 else None

    # ------------------------------------------------------------------------------------------------- what happens to it

    def _meets_posted(self, message: Sending) -> bool:
        source, tag = message.source.rank, message.tag
        for receiving in self._posted:
            if receiving.source == source and receiving.tag == tag:
                self._posted.remove(receiving)
                self._match(message, receiving)
                return True
        return False

    def _match(self, message: Sending, receiving: Receiving) -> None:
        """Join a message and its receive; bodies cross once both are there."""
        arrival, begun = message.arrival, receiving.posted
        if arrival > begun:
            begun = arrival
        receiving.begun, receiving.fields = begun, message.fields
        # a receive posted later may lie in the sender's future
        if not message.bodies or (begun == arrival and not self._ready and begun < self._heap[0][0]):
            self._let_cross(message, receiving, begun)
        else:
            self.cluster.at(begun, message.source, Beginning(self._let_cross, message, receiving))
            if self.waiting is receiving:  # for the header
                self._ready.append(self)

    def _let_cross(self, message: Sending, receiving: Receiving, now_ns: int) -> None:
        end_ns = self._transfer(message, receiving.bodies, now_ns, receiving) if message.bodies else now_ns
        if end_ns >= 0:
            self._ends(message, receiving, end_ns)

    def _ends(self, message: Sending, incoming: Receiving | IncomingBodies, end_ns: int) -> None:
        message.end = incoming.end = end_ns
        if message.source.waiting is message:
            self._ready.append(message.source)
        if self.waiting is incoming:
            self._ready.append(self)

    def _has_crossed(self, message: Sending, incoming: Receiving | IncomingBodies, now_ns: int) -> VirtualRank | None:
        """End a transfer; return this rank if its `take` waits for a whole body."""
        waits_for_it = self.waiting is incoming
        self._ends(message, incoming, now_ns)
        if waits_for_it or type(incoming) is not IncomingBodies:
            return None
        heappush(self._coming, incoming)
        return None if self._alarm is None else self._alarm.happen(now_ns)

    def _transfer(self, message: Sending, bodies: tuple[Any, ...], now_ns: int, incoming: Receiving | IncomingBodies | None) -> int:
        """Let a message cross; return when all is there, -1 = in turns, told to `incoming`. Raises PeerError: no room."""
        nbytes, rank = 0, message.source.rank
        for sent, received in zip(message.bodies, bodies):  # noqa: B905 - memory may be left over
            nbytes += sent.nbytes
            if sent.nbytes > received.nbytes:
                raise PeerError(f"{Tag(message.tag).name} from rank {rank}: {sent.nbytes} bytes, expected {received.nbytes}")
            if type(received) is not SizedVector:
                copy_into(received[: len(sent)], sent)
        if self._turns is None or incoming is None or not nbytes:
            return self.network.transfer(rank, self.rank, nbytes, now_ns)
        self._turns.add(message, incoming, nbytes, now_ns)
        return -1
