"""The communicator of one virtual rank: the methods of `communicator.Communicator`, in virtual time, without MPI.

Sends block as `MPI_Ssend` does: until a receive for the message is posted, or the receiver takes it, and its bytes are
transferred. Nothing is buffered, ever; what would deadlock with rendezvous sends deadlocks here (law 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Pattern
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Cluster, Event, Meeting, VirtualRank
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.together import Memory, VirtualNode, VirtualTeam
from mpisgd.comm.virtual.transfers import Alarm, Opened, Receiving, Waits

_ANYTHING = (None, None)


class Sending(Event):
    """A message under way. As an event, it arrives."""

    __slots__ = ("arrival", "bodies", "dest", "end", "fields", "source", "tag", "waiter")

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
        """Nanosecond at which it is over; -1 = not yet known."""
        self.waiter: VirtualRank | None = None

    def happen(self, now_ns: int) -> VirtualRank | None:
        """It finds its posted receive, or waits to be taken. Returns its receiver where that takes anything."""
        wire = self.dest
        if wire._posted and wire._meets_posted(self):
            return None
        patterns = wire._patterns
        if patterns is not None and wire._takes_anything:  # so nothing else is here
            if now_ns >= wire.now:
                wire.now = now_ns
                wire._patterns = None
                wire._handed = self
                return wire
            if wire._cluster.first_at(wire.now):  # busy until then, and nothing else comes meanwhile
                wire._patterns = None
                wire._handed = self
                return wire
        wire._arrived.setdefault(self.tag, deque()).append(self)
        wire._waiting += 1
        if patterns is None:
            return None
        wire._patterns = None
        if now_ns < wire.now:  # busy until then: what else comes meanwhile may go first
            wire._cluster.at(wire.now, wire, wire)
            return None
        wire.now = now_ns
        return wire

    def describe(self) -> tuple[str, int | None]:
        dest = self.dest.rank
        return f"sends {Tag(self.tag).name} to rank {dest}, which has posted no receive for it", dest


class Beginning(Event):
    """A message has met its receive: as an event, its bytes are transferred."""

    __slots__ = ("message", "receiving")

    def __init__(self, message: Sending, receiving: Receiving) -> None:
        self.message = message
        self.receiving = receiving

    def happen(self, now_ns: int) -> VirtualRank | None:
        self.message.dest.begin(self.message, self.receiving, now_ns)
        return None


class Signal(Event):
    """A signal that tells a rank to come to an end. One that takes whatever comes is told as by a message."""

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


class VirtualWire(Waits, Communicator):
    """A virtual rank, and its end of the communicator."""

    __slots__ = (
        "_arrived",
        "_cluster",
        "_handed",
        "_known",
        "_latency_ns",
        "_network",
        "_node",
        "_overhead_ns",
        "_patterns",
        "_posted",
        "_taken",
        "_takes_anything",
        "_waiting",
        "_wires",
        "deaf",
        "signal",
    )

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire]) -> None:
        """The next rank of a cluster; `wires` are those of all ranks, which it adds itself to."""
        super().__init__(len(wires))
        self._cluster = cluster
        self._network = network
        self._wires = wires
        self._arrived: dict[int, deque[Sending]] = {}
        self._waiting = 0
        self._posted: list[Receiving] = []
        """A handful: searching it is faster than a key for each."""
        self._patterns: tuple[Pattern, ...] | None = None
        self._known: tuple[Pattern, ...] | None = None
        self._takes_anything = False
        self._taken: Sending
        self._handed: Sending | None = None
        self._node: Memory | None = None
        self.signal = 0
        self.deaf = False
        self._latency_ns = network.latency_ns
        self._overhead_ns = network.overhead_ns
        wires.append(self)

    # ------------------------------------------------------------------------------------------------------------ seconds

    def now_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.work(round(seconds * 1e9))

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        self.check = check

    def catch_up(self) -> None:
        """Let everything happen that comes before this rank's clock."""
        self._cluster.until_first(self)

    def start_clock(self) -> None:
        self.meet()

    def meet(self) -> None:
        self._cluster.meet(self)

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]]) -> VirtualTeam:
        return VirtualTeam(self, ranks, bounds)

    def node(self, ranks: Sequence[int]) -> VirtualNode:
        first = self._wires[ranks[0]]
        if first._node is None:
            first._node = Memory(Meeting(self._cluster, ranks))
        return VirtualNode(self, first._node, ranks)

    # --------------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        self.now = now = self.now + self._overhead_ns
        arrival = now + self._latency_ns
        receiver = self._wires[dest]
        message = Sending(self, receiver, tag, fields, bodies, arrival)
        if not (receiver._posted and receiver._meets_posted(message)):
            self._cluster.at(arrival, self, message)
        return message

    def aside(self, body: Any) -> Any:
        """Each virtual rank has a core of its own."""
        return body

    def open(self, dest: int, tag: int, fields: Fields) -> Any:
        """Making the bodies takes no virtual time of its own: they leave together, when the message is closed."""
        return Opened(dest, tag, fields)

    def add(self, opened: Any, body: Any) -> None:
        message: Opened = opened
        message.bodies.append(body)

    def close(self, opened: Any) -> Any:
        message: Opened = opened
        return self.start(message.dest, message.tag, message.fields, *message.bodies)

    def finish(self, transfer: Any) -> bool:
        ending: Sending | Receiving = transfer
        while ending.end < 0:  # again, where it was woken for the header
            ending.waiter = self
            self._cluster.block(self, ending)
        if ending.end > self.now:
            self.now = ending.end
        return True

    # ------------------------------------------------------------------------------------------------------------ receive

    def post(self, source: int, tag: int, *bodies: Any) -> Any:
        return self._post(source, tag, bodies)

    def _post(self, source: int, tag: int, bodies: tuple[Any, ...]) -> Receiving:
        receiving = Receiving(source, tag, bodies, self.now)
        if self._waiting and (arrived := self._arrived.get(tag)):
            for message in arrived:
                if message.source.rank == source:
                    arrived.remove(message)
                    self._waiting -= 1
                    self._match(message, receiving)
                    return receiving
        self._posted.append(receiving)
        return receiving

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, *bodies: Any) -> Any:
        answer = self._post(dest, answer_tag, bodies)
        self.start(dest, tag, fields)  # is taken before it is answered: nothing more is to be waited for
        return answer

    def header(self, posted: Any) -> Fields:
        receiving: Receiving = posted
        if receiving.begun < 0:
            receiving.waiter = self
            self._cluster.block(self, receiving)
        if receiving.begun > self.now:
            self.now = receiving.begun
        return receiving.fields

    def header_or_signal(self, posted: Any) -> None:
        """A virtual signal to a rank that waits for one message only is heard of when that is there."""
        self.header(posted)

    def arrived(self, posted: Any) -> bool:
        receiving: Receiving = posted
        self._cluster.until_first(self)
        return 0 <= receiving.begun <= self.now

    def withdraw(self, posted: Any) -> None:
        """Nothing is lost by a receive that stays posted."""

    def take(self, patterns: tuple[Pattern, ...]) -> tuple[int, int, Fields]:
        message: Sending | None = None
        if self._waiting:
            self._cluster.until_first(self)
            message = self._look(patterns)
        if message is None:
            message = self._wait_for(patterns)
        assert message is not None
        return self._taking(message)

    def _wait_for(self, patterns: tuple[Pattern, ...], alarm: Alarm | None = None) -> Sending | None:
        """Wait until a message is here that matches, or until the alarm."""
        if patterns is not self._known:
            self._known = patterns
            self._takes_anything = patterns[-1] == _ANYTHING
        while alarm is None or not alarm.over:
            self._patterns = patterns
            self._cluster.block(self, self)
            message = self._handed
            if message is not None:
                self._handed = None
                return message
            if (message := self._look(patterns)) is not None:
                return message
        return None

    def _taking(self, message: Sending) -> tuple[int, int, Fields]:
        self._taken = message
        self.now = now_ns = self.now + self._overhead_ns
        if not message.bodies:
            message.end = now_ns
            if message.waiter is not None:
                self._cluster.wake(message.waiter, now_ns)
                message.waiter = None
        return message.source.rank, message.tag, message.fields

    def take_until(self, patterns: tuple[Pattern, ...], until_ns: int) -> tuple[int, int, Fields] | None:
        self._cluster.until_first(self)
        message = self._look(patterns)
        if message is None:
            alarm = Alarm(self)
            self._cluster.at(max(self.now, until_ns), self, alarm)
            message = self._wait_for(patterns, alarm)
            alarm.over = True
        return None if message is None else self._taking(message)

    def stops_waiting(self, now_ns: int) -> bool:
        """The time to wait for a message is over; False where one has come."""
        if self._patterns is None:
            return False
        self._patterns = None
        if now_ns > self.now:
            self.now = now_ns
        return True

    def take_body(self, *bodies: Any) -> bool:
        self._cluster.until_first(self)
        message = self._taken
        self.now = message.end = end_ns = self._transfer(message, bodies, self.now)
        if message.waiter is not None:
            self._cluster.wake(message.waiter, end_ns)
            message.waiter = None
        return True

    def give_up(self, rank: int) -> None:
        """Here nobody hangs."""

    def _look(self, patterns: tuple[Pattern, ...]) -> Sending | None:
        """The first message that has arrived, of the first pattern that any matches."""
        arrived = self._arrived
        for source, tag in patterns:
            found: Sending | None = None
            for queue in arrived.values() if tag is None else (arrived[tag],) if tag in arrived else ():
                if not queue:
                    continue
                message = queue[0]
                if source is not None and message.source.rank != source:
                    of_source = [each for each in queue if each.source.rank == source]
                    if not of_source:
                        continue
                    message = of_source[0]
                if found is None or message.arrival < found.arrival:
                    found = message
            if found is not None:
                queue = arrived[found.tag]
                if queue[0] is found:
                    queue.popleft()
                else:
                    queue.remove(found)
                self._waiting -= 1
                return found
        return None

    def describe(self) -> tuple[str, int | None]:
        """Describe what this rank waits for, where it takes what comes."""
        patterns = self._patterns or ()
        sources = {source for source, _ in patterns}
        wanted = " or ".join("anything" if tag is None else Tag(tag).name for _, tag in patterns)
        return f"waits for {wanted}", sources.pop() if len(sources) == 1 else None

    # ------------------------------------------------------------------------------------------------- what happens to it

    def _meets_posted(self, message: Sending) -> bool:
        """Whether a receive was posted for a message, which is then matched with the first."""
        source, tag = message.source.rank, message.tag
        for at, receiving in enumerate(self._posted):
            if receiving.source == source and receiving.tag == tag:
                self._posted.pop(at)
                self._match(message, receiving)
                return True
        return False

    def _match(self, message: Sending, receiving: Receiving) -> None:
        """A message and its receive have met: the header is there; the transfer of the bodies begins as soon as both are."""
        arrival, posted = message.arrival, receiving.posted
        receiving.begun = begun = arrival if arrival > posted else posted
        receiving.fields = message.fields
        cluster = self._cluster
        if not message.bodies:
            self._ends(message, receiving, begun)
        elif begun == arrival and cluster.first_at(begun):  # a receive posted later may lie in the sender's future
            self.begin(message, receiving, begun)
        else:
            cluster.at(begun, message.source, Beginning(message, receiving))
            if receiving.waiter is not None:  # for the header
                cluster.wake(receiving.waiter, begun)
                receiving.waiter = None

    def begin(self, message: Sending, receiving: Receiving, now_ns: int) -> None:
        """The transfer of a message that has met its receive begins."""
        self._ends(message, receiving, self._transfer(message, receiving.bodies, now_ns))

    def _ends(self, message: Sending, receiving: Receiving, end_ns: int) -> None:
        """Note when a transfer is over; who waits for that, at either end, goes on."""
        message.end = receiving.end = end_ns
        if message.waiter is not None:
            self._cluster.wake(message.waiter, end_ns)
            message.waiter = None
        if receiving.waiter is not None:
            self._cluster.wake(receiving.waiter, end_ns)
            receiving.waiter = None

    def _transfer(self, message: Sending, bodies: tuple[Any, ...], now_ns: int) -> int:
        """The bytes of a message cross the links; when the last is there. Raises PeerError where there is no room for them."""
        nbytes, rank = 0, message.source.rank
        for sent, received in zip(message.bodies, bodies, strict=False):
            size: int = sent.nbytes
            if size > received.nbytes:
                raise PeerError(f"{Tag(message.tag).name} from rank {rank}: {size} bytes, expected {received.nbytes}")
            if type(received) is np.ndarray:
                received[: len(sent)] = sent
            nbytes += size
        return self._network.transfer(rank, self.rank, nbytes, now_ns)
