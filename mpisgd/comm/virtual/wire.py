"""The communicator of one virtual rank: the methods of `communicator.Communicator`, in virtual time, without MPI.

Sends block as `MPI_Ssend` does: until a receive for the message is posted, or the receiver takes it, and its bytes are
transferred. Nothing is buffered, ever; what would deadlock with rendezvous sends deadlocks here (law 1).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from mypy_extensions import mypyc_attr

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Communicator, Node, Pattern, Team
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Cluster, Event, Meeting, VirtualRank
from mpisgd.comm.virtual.network import Network

_ANYTHING: Final = (None, None)
_ARRAY: Final = np.ndarray


class Transfer(Event):
    """A message on one side: what is to be sent, or where it is to go."""

    __slots__ = ("bodies", "end", "fields", "source", "tag", "waiter")

    def __init__(self, source: int, tag: int, fields: Fields, bodies: tuple[Any, ...]) -> None:
        self.source = source
        self.tag = tag
        self.fields = fields
        self.bodies = bodies
        self.end = -1
        """Nanosecond at which it is over; -1 = not yet known."""
        self.waiter: VirtualRank | None = None


class Sending(Transfer):
    """A message under way. As an event it arrives; once it is matched with a receive, its bytes are transferred."""

    __slots__ = ("arrival", "dest", "receiving")

    def __init__(self, source: int, dest: VirtualWire, tag: int, fields: Fields, bodies: tuple[Any, ...], arrival: int) -> None:
        super().__init__(source, tag, fields, bodies)
        self.dest = dest
        self.arrival = arrival
        self.receiving: Receiving | None = None

    def happen(self, now_ns: int) -> VirtualRank | None:
        if self.receiving is None:
            return self.dest.arrive(self, now_ns)
        self.dest.begin(self, self.receiving, now_ns)
        return None

    def describe(self) -> tuple[str, int | None]:
        dest = self.dest.rank
        return f"sends {Tag(self.tag).name} to rank {dest}, which has posted no receive for it", dest


class Opened:
    """A message whose bodies are still being made."""

    __slots__ = ("bodies", "dest", "fields", "tag")

    def __init__(self, dest: int, tag: int, fields: Fields) -> None:
        self.dest = dest
        self.tag = tag
        self.fields = fields
        self.bodies: list[Any] = []


class Receiving(Transfer):
    """A receive that was posted."""

    __slots__ = ("begun", "posted")

    def __init__(self, source: int, tag: int, bodies: tuple[Any, ...], posted: int) -> None:
        super().__init__(source, tag, (), bodies)
        self.posted = posted
        self.begun = -1

    def describe(self) -> tuple[str, int | None]:
        return f"waits for {Tag(self.tag).name} of rank {self.source}", self.source


class Alarm(Event):
    """The time at which a rank waits no longer, if it still does."""

    __slots__ = ("over", "wire")

    def __init__(self, wire: VirtualWire) -> None:
        self.wire = wire
        self.over = False

    def happen(self, now_ns: int) -> VirtualRank | None:
        if self.over or not self.wire.stops_waiting(now_ns):
            return None
        self.over = True
        return self.wire


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
        return wire.arrive(Sending(wire.rank, wire, Tag.INTERRUPT, (self.number,), (), now_ns), now_ns)


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualWire(VirtualRank, Communicator):
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
        self._node: _Memory | None = None
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

    def start_clock(self, already_s: float = 0.0) -> None:
        self.meet()
        self.now += math.ceil(already_s * 1e9)

    def meet(self) -> None:
        self._cluster.meet(self)

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]]) -> VirtualTeam:
        return VirtualTeam(self, ranks, bounds)

    def node(self, ranks: Sequence[int]) -> VirtualNode:
        first = self._wires[ranks[0]]
        if first._node is None:
            first._node = _Memory(Meeting(self._cluster, ranks))
        return VirtualNode(self, first._node, ranks)

    # --------------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        self.now = now = self.now + self._overhead_ns
        receiver = self._wires[dest]
        message = Sending(self.rank, receiver, tag, fields, bodies, now + self._latency_ns)
        if not (receiver._posted and receiver._meets_posted(message)):
            self._cluster.at(message.arrival, self, message)
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
        ending: Transfer = transfer
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
                if message.source == source:
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
        self._knows(patterns)
        while message is None:
            self._patterns = patterns
            self._cluster.block(self, self)
            message = self._handed or self._look(patterns)
            self._handed = None
        return self._taking(message)

    def _taking(self, message: Sending) -> tuple[int, int, Fields]:
        self._taken = message
        self.now += self._overhead_ns
        if not message.bodies:
            self._ends(message, self.now)
        return message.source, message.tag, message.fields

    def take_until(self, patterns: tuple[Pattern, ...], until_ns: int) -> tuple[int, int, Fields] | None:
        cluster = self._cluster
        cluster.until_first(self)
        message = self._look(patterns)
        alarm = Alarm(self)
        if message is None:
            cluster.at(max(self.now, until_ns), self, alarm)
        self._knows(patterns)
        while message is None and not alarm.over:
            self._patterns = patterns
            cluster.block(self, self)
            message = self._handed or self._look(patterns)
            self._handed = None
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

    def _knows(self, patterns: tuple[Pattern, ...]) -> None:
        if patterns is not self._known:
            self._known = patterns
            self._takes_anything = patterns[-1] == _ANYTHING

    def take_body(self, *bodies: Any) -> bool:
        self._cluster.until_first(self)
        self.now = self._transfer(self._taken, bodies, self.now)
        self._ends(self._taken, self.now)
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
                if source is not None and message.source != source:
                    of_source = [each for each in queue if each.source == source]
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

    def arrive(self, message: Sending, now_ns: int) -> VirtualRank | None:
        """A message is here: it finds its posted receive, or waits to be taken. Returns this rank where it takes anything."""
        if self._posted and self._meets_posted(message):
            return None
        patterns = self._patterns
        if patterns is not None and self._takes_anything:  # so nothing else is here
            if now_ns >= self.now:
                self.now = now_ns
                self._patterns = None
                self._handed = message
                return self
            if self._cluster.first_at(self.now):  # busy until then, and nothing else comes meanwhile
                self._patterns = None
                self._handed = message
                return self
        queue = self._arrived.get(message.tag)
        if queue is None:
            queue = self._arrived[message.tag] = deque()
        queue.append(message)
        self._waiting += 1
        if patterns is None:
            return None
        self._patterns = None
        if now_ns < self.now:  # busy until then: what else comes meanwhile may go first
            self._cluster.at(self.now, self, self)
            return None
        self.now = now_ns
        return self

    def _meets_posted(self, message: Sending) -> bool:
        """Whether a receive was posted for a message, which is then matched with the first."""
        for at, receiving in enumerate(self._posted):
            if receiving.source == message.source and receiving.tag == message.tag:
                self._posted.pop(at)
                self._match(message, receiving)
                return True
        return False

    def _match(self, message: Sending, receiving: Receiving) -> None:
        """A message and its receive have met: the header is there; the transfer of the bodies begins as soon as both are."""
        begun = message.arrival if message.arrival > receiving.posted else receiving.posted
        receiving.begun = begun
        receiving.fields = message.fields
        cluster = self._cluster
        if not message.bodies:
            self._ends(message, begun)
            self._ends(receiving, begun)
        elif begun == message.arrival and cluster.first_at(begun):  # a receive posted later may lie in the sender's future
            self.begin(message, receiving, begun)
        else:
            message.receiving = receiving
            cluster.at(begun, self._wires[message.source], message)
            if receiving.waiter is not None:  # for the header
                cluster.wake(receiving.waiter, begun)
                receiving.waiter = None

    def begin(self, message: Sending, receiving: Receiving, now_ns: int) -> None:
        """The transfer of a message that has met its receive begins."""
        end = self._transfer(message, receiving.bodies, now_ns)
        self._ends(message, end)
        self._ends(receiving, end)

    def _ends(self, transfer: Transfer, end_ns: int) -> None:
        """Note when a transfer is over; who waits for that goes on."""
        transfer.end = end_ns
        if transfer.waiter is not None:
            self._cluster.wake(transfer.waiter, end_ns)
            transfer.waiter = None

    def _transfer(self, message: Sending, bodies: tuple[Any, ...], now_ns: int) -> int:
        """The bytes of a message cross the links; when the last is there. Raises PeerError where there is no room for them."""
        nbytes = 0
        for at, body in enumerate(message.bodies):
            sent: Buffer = body
            received: Buffer = bodies[at]
            size = sent.nbytes
            if size > received.nbytes:
                raise PeerError(f"{Tag(message.tag).name} from rank {message.source}: {size} bytes, expected {received.nbytes}")
            if type(received) is _ARRAY:
                received[: len(body)] = body
            nbytes += size
        return self._network.transfer(message.source, self.rank, nbytes, now_ns)


class VirtualTeam(Team):
    """Ranks that act together, by the messages that MPI's collectives are made of: so these cost what messages cost.

    Headers are gathered in rounds, over twice the distance each (Bruck et al. 1997): ceil(log2 places) latencies. Slices, which
    are large, go from each rank to each other one directly, to the next place first, so that no link is everybody's first.
    """

    def __init__(self, wire: VirtualWire, ranks: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        place = ranks.index(wire.rank)
        self._wire = wire
        self._ranks = ranks
        self._bounds = bounds
        self._place = place
        self._others = [(place + away) % len(ranks) for away in range(1, len(ranks))]

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        wire, ranks, place = self._wire, self._ranks, self._place
        known, away = [fields], 1  # known[i] is of the place that is i further on
        while away < len(ranks):
            posted = wire.post(ranks[(place + away) % len(ranks)], tag)
            sent = wire.start(ranks[place - away], tag, tuple(known[: len(ranks) - away]))
            known += wire.header(posted)
            wire.finish(sent)
            away *= 2
        return known[len(ranks) - place :] + known[: len(ranks) - place]

    def exchange(self, vector: Any, received: Any) -> None:
        own, wire = self._slice(vector, self._place), self._wire
        size = len(range(*self._bounds[self._place]))
        rows = [received[place * size : (place + 1) * size] for place in range(len(self._ranks))]
        _copy(own, rows[self._place])
        posted = [wire.post(self._ranks[place], Tag.GRADIENT, rows[place]) for place in reversed(self._others)]
        sent = [wire.start(self._ranks[place], Tag.GRADIENT, (), self._slice(vector, place)) for place in self._others]
        self._wait(posted, sent)

    def share(self, own: Any, vector: Any) -> tuple[list[Receiving], list[Sending]]:
        wire = self._wire
        _copy(own, self._slice(vector, self._place))
        posted = [wire.post(self._ranks[place], Tag.WEIGHTS, self._slice(vector, place)) for place in reversed(self._others)]
        return posted, [wire.start(self._ranks[place], Tag.WEIGHTS, (), own) for place in self._others]

    def finish(self, shared: tuple[list[Receiving], list[Sending]], meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self._wait(*shared)

    def _wait(self, posted: list[Receiving], sent: list[Sending]) -> None:
        for each in posted:  # bodies come after headers, though these say nothing here
            self._wire.header(each)
        for transfer in (*posted, *sent):
            self._wire.finish(transfer)

    def disband(self) -> None:
        """Nothing is held."""

    def _slice(self, vector: Any, place: int) -> Any:
        start, end = self._bounds[place]
        return vector[start:end]


class _Memory:
    """Memory that ranks of one node have in common."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.pieces: list[list[np.ndarray]] = []


class VirtualNode(Node):
    """Ranks that share memory. That takes no time of its own: who reads or writes much says so on its own clock."""

    def __init__(self, wire: VirtualWire, memory: _Memory, ranks: Sequence[int]) -> None:
        self.place: int = ranks.index(wire.rank)
        self.places: int = len(ranks)
        self._wire = wire
        self._memory = memory
        self._asked = 0

    def vectors(self, count: int, size: int) -> list[Any]:
        return self._piece(count, size, "float32")

    def words(self, count: int) -> Any:
        return self._piece(1, count, "float64")[0]

    def _piece(self, count: int, size: int, kind: str) -> list[Any]:
        """The next piece of memory, which the first rank that asks for it makes."""
        pieces = self._memory.pieces
        if self._asked == len(pieces):
            pieces.append([np.zeros(size, kind) for _ in range(count)])
        self._asked += 1
        return pieces[self._asked - 1]

    def meet(self) -> None:
        self._memory.meeting.join(self._wire)

    def disband(self) -> None:
        """Python keeps the memory as long as anybody looks at it."""


def _copy(own: Any, into: Any) -> None:
    """Copy what a rank gives itself, without a message; of sizes there is nothing to copy."""
    if type(into) is np.ndarray:
        into[:] = own
