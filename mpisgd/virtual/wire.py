"""The communicator of one virtual rank: the methods of `communicator.Communicator`, in virtual time, without MPI.

Sends block as `MPI_Ssend` does: until a receive for the message is posted, or the receiver takes it, and its bytes are
transferred. Nothing is buffered, ever; what would deadlock with rendezvous sends deadlocks here (law 1).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from mpisgd.communicator import Pattern
from mpisgd.errors import PeerError
from mpisgd.messages import Fields, Tag
from mpisgd.virtual.cluster import Cluster, VirtualRank
from mpisgd.virtual.network import Network


class Sending:
    """A message under way. It arrives, is matched with a receive, and its bytes are transferred."""

    __slots__ = ("arrival", "bodies", "dest", "end", "fields", "receiving", "sender", "tag", "waiter")

    def __init__(self, sender: VirtualWire, dest: VirtualWire, tag: int, fields: Fields, bodies: Any, arrival: int) -> None:
        self.sender = sender
        self.dest = dest
        self.tag = tag
        self.fields = fields
        self.bodies = bodies
        self.arrival = arrival
        self.end: int | None = None
        self.waiter: VirtualRank | None = None
        self.receiving: Receiving | None = None

    def happen(self, now_ns: int) -> VirtualRank | None:
        """Before it is matched: it arrives. After: its transfer begins."""
        if self.receiving is None:
            return self.dest.arrive(self, now_ns)
        self.dest.transfer(self, self.receiving, now_ns)
        return None

    def describe(self) -> tuple[str, int | None]:
        dest = self.dest.rank
        return f"sends {Tag(self.tag).name} to rank {dest}, which has posted no receive for it", dest


class Receiving:
    """A receive: posted, or of a message that was taken."""

    __slots__ = ("begun", "bodies", "end", "fields", "posted", "source", "tag", "waiter")

    def __init__(self, source: int, tag: int, bodies: Any, posted: int) -> None:
        self.source = source
        self.tag = tag
        self.bodies = bodies
        self.posted = posted
        self.fields: Fields = ()
        self.begun: int | None = None
        self.end: int | None = None
        self.waiter: VirtualRank | None = None

    def describe(self) -> tuple[str, int | None]:
        return f"waits for {Tag(self.tag).name} of rank {self.source}", self.source


class Taking:
    """Waiting for whatever comes, or for one rank."""

    __slots__ = ("patterns",)

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns

    def describe(self) -> tuple[str, int | None]:
        sources = {source for source, _ in self.patterns}
        wanted = " or ".join("anything" if tag is None else Tag(tag).name for _, tag in self.patterns)
        return f"waits for {wanted}", sources.pop() if len(sources) == 1 else None


class VirtualWire:
    """One virtual rank's end of the communicator."""

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire]) -> None:
        self.rank = len(wires)
        self._cluster = cluster
        self._network = network
        self._wires = wires
        self._self: VirtualRank = cluster.ranks[self.rank]
        self._arrived: dict[int, deque[Sending]] = {}
        self._posted: dict[tuple[int, int], deque[Receiving]] = {}
        self._waiting = 0
        self._takes = False
        self._taken: Sending
        self._latency_ns = network.latency_ns
        self._overhead_ns = network.overhead_ns
        wires.append(self)

    # ------------------------------------------------------------------------------------------------------------ seconds

    def now_ns(self) -> int:
        return self._self.now

    def sleep(self, seconds: float) -> None:
        self._self.now += round(seconds * 1e9)

    def work(self, ns: int) -> None:
        """Let nanoseconds pass on this rank."""
        self._self.now += ns

    def catch_up(self) -> None:
        """Let everything happen that comes before this rank's clock."""
        self._cluster.until_first(self._self)

    def start_clock(self) -> None:
        self.meet()

    def meet(self) -> None:
        self._cluster.meet(self._self)

    # --------------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Sending:
        me = self._self
        me.now += self._overhead_ns
        arrival = me.now + self._latency_ns
        receiver = self._wires[dest]
        message = Sending(self, receiver, tag, fields, bodies, arrival)
        posted = receiver._posted.get((self.rank, tag))
        if posted:
            receiver.match(message, posted.popleft())
        else:
            self._cluster.at(arrival, message)
        return message

    def finish(self, *transfers: Sending | Receiving) -> None:
        me = self._self
        for transfer in transfers:
            end = transfer.end
            if end is None:
                transfer.waiter = me
                self._cluster.block(me, transfer)
                end = transfer.end
                assert end is not None
            me.now = max(me.now, end)

    # ------------------------------------------------------------------------------------------------------------ receive

    def post(self, source: int, tag: int, *bodies: Any) -> Receiving:
        receiving = Receiving(source, tag, bodies, self._self.now)
        arrived = self._arrived.get(tag)
        if arrived:
            for message in arrived:
                if message.sender.rank == source:
                    arrived.remove(message)
                    self._waiting -= 1
                    self.match(message, receiving)
                    return receiving
        key = (source, tag)
        posted = self._posted.get(key)
        if posted is None:
            self._posted[key] = deque((receiving,))
        else:
            posted.append(receiving)
        return receiving

    def header(self, posted: Receiving) -> Fields:
        me = self._self
        begun = posted.begun
        if begun is None:
            posted.waiter = me
            self._cluster.block(me, posted)
            begun = posted.begun
            assert begun is not None
        me.now = max(me.now, begun)
        return posted.fields

    def take(self, patterns: tuple[Pattern, ...]) -> tuple[int, int, Fields]:
        me, cluster = self._self, self._cluster
        message: Sending | None = None
        if self._waiting:
            cluster.until_first(me)
            message = self._look(patterns)
        while message is None:
            self._takes = True
            cluster.block(me, Taking(patterns))
            message = self._look(patterns)
        self._taken = message
        me.now += self._overhead_ns
        if not message.bodies:
            message.end = me.now
            if message.waiter is not None:
                cluster.wake(message.waiter, me.now)
        return message.sender.rank, message.tag, message.fields

    def take_body(self, *bodies: Any) -> None:
        message, me = self._taken, self._self
        receiving = Receiving(message.sender.rank, message.tag, bodies, me.now)
        self.match(message, receiving)
        self.finish(receiving)

    def _look(self, patterns: tuple[Pattern, ...]) -> Sending | None:
        """The first message that has arrived, of the first pattern that any matches."""
        arrived = self._arrived
        for source, tag in patterns:
            if tag is not None:
                queues = [arrived[tag]] if tag in arrived else []
            else:
                queues = [queue for queue in arrived.values() if queue]
            found: Sending | None = None
            for queue in queues:
                for message in queue:
                    if source is None or message.sender.rank == source:
                        if found is None or message.arrival < found.arrival:
                            found = message
                        break
            if found is not None:
                arrived[found.tag].remove(found)
                self._waiting -= 1
                return found
        return None

    # ------------------------------------------------------------------------------------------------- what happens to it

    def arrive(self, message: Sending, now_ns: int) -> VirtualRank | None:
        """A message is here: it finds its posted receive, or waits to be taken. Returns this rank where it takes anything."""
        posted = self._posted.get((message.sender.rank, message.tag))
        if posted:
            self.match(message, posted.popleft())
            return None
        queue = self._arrived.get(message.tag)
        if queue is None:
            queue = self._arrived[message.tag] = deque()
        queue.append(message)
        self._waiting += 1
        if not self._takes:
            return None
        self._takes = False
        me = self._self
        if now_ns < me.now:  # busy until then: what else comes meanwhile may go first
            self._cluster.at(me.now, me)
            return None
        me.now = now_ns
        return me

    def match(self, message: Sending, receiving: Receiving) -> None:
        """A message and its receive have met: the header is there; the transfer of the bodies begins as soon as both are."""
        begun = message.arrival if message.arrival > receiving.posted else receiving.posted
        receiving.begun = begun
        receiving.fields = message.fields
        message.receiving = receiving
        cluster = self._cluster
        if receiving.bodies or message.bodies:
            if cluster.first_at(begun):
                self.transfer(message, receiving, begun)
                return
            cluster.at(begun, message)
        else:
            message.end = receiving.end = begun
            if message.waiter is not None:
                cluster.wake(message.waiter, begun)
        if receiving.waiter is not None:
            cluster.wake(receiving.waiter, begun)
            receiving.waiter = None

    def transfer(self, message: Sending, receiving: Receiving, now_ns: int) -> None:
        """The bytes of the bodies cross the links. Raises PeerError where more come than there is room for."""
        nbytes = 0
        for sent, received in zip(message.bodies, receiving.bodies, strict=True):
            nbytes += sent.nbytes
            if sent.nbytes > received.nbytes:
                raise PeerError(
                    f"{Tag(message.tag).name} from rank {message.sender.rank}: {sent.nbytes} bytes, expected {received.nbytes}"
                )
            if type(received) is np.ndarray:
                received[: len(sent)] = sent
        cluster = self._cluster
        end = self._network.transfer(message.sender.rank, self.rank, nbytes, now_ns)
        message.end = receiving.end = end
        if message.waiter is not None:
            cluster.wake(message.waiter, end)
        if receiving.waiter is not None:
            cluster.wake(receiving.waiter, end)
            receiving.waiter = None
