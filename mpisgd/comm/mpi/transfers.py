"""Messages that are under way, the copies that some leave from, and what is wrong with one that is not as it should be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import LAYOUTS, Layout, Tag
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.waiting import Transfer

_TAGS = frozenset(Tag)
BODY_S = 30.0
"""Seconds after which a slice does not come any more whose header is there: its sender began both at once."""

_SINK = 2**20
"""Bytes of memory for messages that nobody wants."""


def name_of_tag(tag: int) -> str:
    return Tag(tag).name if tag in _TAGS else f"tag {tag}"


class Outbox:
    """Copies of bodies, each kept as it is until all to whom it is sent have it, so that nobody waits until they are received:
    MPI's buffered mode, in bounded memory of our own.

    Where a node has more ranks than cores, a learner that waits for weights sleeps, and when it wakes it queues for a core. A shard
    that waits until its answers are taken spends most of its time so, and everybody else waits for the shard: with 30 learners on
    two cores that was 83 % of it. A learner is sent one answer at a time, so there are at most as many copies as learners, and
    nothing rests on them (law 1): a shard still answers only those whose receives are posted, and with MPISGD_SSEND=1 there are no
    copies.
    """

    def __init__(self) -> None:
        self.newest: np.ndarray | None = None
        """The copy made last; what is sent of it is said by `keep` as soon as it has begun."""
        self._under_way: list[tuple[np.ndarray, list[MPI.Request]]] = []
        self._free: list[np.ndarray] = []

    def copy(self, body: np.ndarray) -> np.ndarray:
        """A copy to send from."""
        self._free = [copy for copy in self._free if copy.nbytes == body.nbytes]
        still = []
        for copy, requests in self._under_way:
            requests[:] = [request for request in requests if not request.Test()]
            if requests:
                still.append((copy, requests))
            elif copy.nbytes == body.nbytes:
                self._free.append(copy)
        self.newest = newest = self._free.pop() if self._free else np.empty_like(body)
        np.copyto(newest, body)
        self._under_way = [*still, (newest, [])]
        return newest

    def keep(self, requests: list[MPI.Request]) -> None:
        """The newest copy stays as it is until these, too, are done."""
        self._under_way[-1][1].extend(requests)

    def empty(self) -> None:
        """Wait until all have left."""
        for _, requests in self._under_way:
            for request in requests:
                request.Wait()
        self.newest = None
        self._under_way.clear()


class Sending(Transfer):
    """A message that is being sent."""

    __slots__ = ("announced", "dest", "outbox", "requests", "tag")

    def __init__(self, dest: int, tag: int, announced: bool, requests: list[MPI.Request], outbox: Outbox | None = None) -> None:
        self.dest = dest
        self.tag = tag
        self.announced = announced
        self.requests = requests
        self.outbox = outbox
        """Whose newest copy it leaves from; None = from memory of the caller's."""

    def has_left(self) -> bool:
        """Whether nobody need wait for it."""
        return self.outbox is not None or bool(MPI.Request.Testall(self.requests))

    def describe(self, name: Callable[[int], str]) -> str:
        return f"waits for {name(self.dest)} to take {Tag(self.tag).name}"


class Coming:
    """The bodies of a message that are received while others are taken: each from when MPI has seen it (`begin`)."""

    __slots__ = ("_error", "_requests", "_rooms", "source", "tag", "until_s")

    def __init__(self, source: int, tag: int, rooms: Sequence[Any]) -> None:
        self.source = source
        self.tag = tag
        self._rooms = rooms
        self.until_s = math.inf
        """By then (`perf_counter`) the next body must have been seen: seconds in which this rank computes do not count
        (`Arrivals.beside`)."""
        self._requests: list[MPI.Request] = []
        """Of the first bodies."""
        self._error: PeerError | None = None

    def is_awaited_of(self, source: int) -> bool:
        """Whether more is to come of this rank, and MPI has not seen it."""
        return source == self.source and len(self._requests) < len(self._rooms) and self._error is None

    def begin(self, nbytes: int, message: MPI.Message) -> None:
        """The next body; of another size than there is room for, it is thrown away."""
        room = self._rooms[len(self._requests)]
        if nbytes == room.nbytes:
            self._requests.append(message.Irecv(room))
            self.until_s = time.perf_counter() + BODY_S  # each has as long, as in `take_body`: many may take minutes
            return
        message.Recv(nowhere(nbytes))
        why = f"{name_of_tag(self.tag)} from rank {self.source}: {nbytes} bytes, expected {room.nbytes}"
        self._error = PeerError(why, self.source)

    def miss(self, tag: int) -> None:
        """Another message has come in its place."""
        why = f"rank {self.source} sent a header, but no {name_of_tag(self.tag)} after it: {name_of_tag(tag)} came"
        self._error = PeerError(why, self.source)

    def is_whole(self) -> bool:
        if len(self._requests) == len(self._rooms):
            return bool(MPI.Request.Testall(self._requests))
        return self._error is not None or time.perf_counter() > self.until_s

    def check(self) -> None:
        if len(self._requests) < len(self._rooms):
            MPI.Request.Waitall(self._requests)  # whose memory will be used again
            name = name_of_tag(self.tag)
            why = f"rank {self.source} sent a header, but no {name} after it: nothing came for {BODY_S:g} s"
            raise self._error or PeerError(why, self.source)


class Opened:
    """A message whose bodies are added one after the other."""

    def __init__(self, sending: Sending, add: Callable[[Sending, Any], None]) -> None:
        self._sending = sending
        self._add = add

    def add(self, body: Any) -> None:
        """Begin to send the next body."""
        self._add(self._sending, body)

    def close(self) -> Sending:
        """All bodies were added."""
        return self._sending


class Receiving(Transfer):
    """A message whose receives are posted: the header's, then the bodies'.

    `rooms`: bytes that each body has room for; `nbytes`: of all, as the header says; 0 = the bodies are empty. A single body may be
    shorter than its room.
    """

    __slots__ = ("buffer", "layout", "nbytes", "requests", "rooms", "source")

    def __init__(self, source: int, layout: Layout, buffer: bytearray, requests: list[MPI.Request], rooms: list[int]) -> None:
        self.source = source
        self.layout = layout
        self.buffer = buffer
        self.requests = requests
        self.rooms = rooms
        self.nbytes = 0

    def arrived(self) -> bool:
        """Whether the header is there."""
        return bool(self.requests[0].Test())

    def withdraw(self) -> None:
        """Cancel it: nothing will be sent to it any more."""
        for request in self.requests:
            request.Cancel()
            request.Wait()

    def describe(self, name: Callable[[int], str]) -> str:
        tag = next(Tag(each).name for each, known in LAYOUTS.items() if known is self.layout)
        return f"waits for {tag} of {name(self.source)}"

    def check(self, at: int, nbytes: int) -> None:
        """So many bytes of this body have come. Raises PeerError where it was shorter: MPI says nothing of that (TRAPS 9)."""
        expected = min(self.rooms[at], self.nbytes)
        if nbytes != expected:
            raise PeerError(f"{name_of_tag(self.layout.body)} from rank {self.source}: {nbytes} bytes, expected {expected}")


def of_size(error: MPI.Exception, transfer: Sending | Receiving, part: str) -> Exception:
    """Choose what to raise for an error of MPI: PeerError where a message was longer than the memory posted for it."""
    if not isinstance(transfer, Receiving) or error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
        return error
    tag = next(Tag(each).name for each, known in LAYOUTS.items() if known is transfer.layout)
    return PeerError(f"{tag} from rank {transfer.source}: its {part} is longer than expected")


def nowhere(nbytes: int) -> Any:
    """Memory for a message of so many bytes that nobody wants: little of it, which a long one overwrites."""
    if nbytes <= _SINK:
        return bytearray(nbytes)
    times, rest = divmod(nbytes, _SINK)
    block = MPI.BYTE.Create_contiguous(_SINK)
    again, last = block.Create_hvector(times, 1, 0), MPI.BYTE.Create_contiguous(rest)
    return [bytearray(_SINK), 1, MPI.Datatype.Create_struct([1, 1], [0, 0], [again, last]).Commit()]
