"""Messages under way, copies to send from, and errors of malformed messages."""

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
"""Seconds to wait for a slice after its header: senders begin both at once."""

_SINK = 2**20


def name_of_tag(tag: int) -> str:
    return Tag(tag).name if tag in _TAGS else f"tag {tag}"


class Outbox:
    """Copies of bodies, kept until received, so nobody waits: MPI's buffered mode in bounded memory.

    With more ranks than cores, a shard would wait most of its time for learners to take answers (TRAPS 11). A learner gets one
    answer at a time: at most as many copies as learners. Nothing rests on copies (law 1): shards answer only posted receives, and
    MPISGD_SSEND=1 makes none.
    """

    def __init__(self) -> None:
        self.newest: np.ndarray | None = None
        self._under_way: list[tuple[np.ndarray, list[MPI.Request]]] = []
        self._free: list[np.ndarray] = []

    def copy(self, body: np.ndarray) -> np.ndarray:
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
        """Keep the newest copy until these requests are done, too."""
        self._under_way[-1][1].extend(requests)

    def empty(self) -> None:
        for _, requests in self._under_way:
            for request in requests:
                request.Wait()
        self.newest = None
        self._under_way.clear()


class Sending(Transfer):
    __slots__ = ("announced", "dest", "outbox", "requests", "tag")

    def __init__(self, dest: int, tag: int, announced: bool, requests: list[MPI.Request], outbox: Outbox | None = None) -> None:
        self.dest = dest
        self.tag = tag
        self.announced = announced
        self.requests = requests
        self.outbox = outbox
        """Outbox of the sent copy; None = the caller's memory."""

    @property
    def peer(self) -> int:
        return self.dest

    def has_left(self) -> bool:
        return self.outbox is not None or bool(MPI.Request.Testall(self.requests))

    def describe(self, name: Callable[[int], str]) -> str:
        return f"waits for {name(self.dest)} to take {Tag(self.tag).name}"


class IncomingBodies:
    """Bodies received beside other messages, each once MPI has seen it (`begin`)."""

    __slots__ = ("_error", "_requests", "_rooms", "source", "tag", "until_s")

    def __init__(self, source: int, tag: int, rooms: Sequence[Any]) -> None:
        self.source = source
        self.tag = tag
        self._rooms = rooms
        self.until_s = math.inf
        """Deadline (`perf_counter`) for MPI to see the next body, without seconds of computing (`Arrivals.beside`)."""
        self._requests: list[MPI.Request] = []
        self._error: PeerError | None = None

    def is_awaited_of(self, source: int) -> bool:
        return source == self.source and len(self._requests) < len(self._rooms) and self._error is None

    def begin(self, nbytes: int, message: MPI.Message) -> None:
        room = self._rooms[len(self._requests)]
        if nbytes == room.nbytes:
            self._requests.append(message.Irecv(room))
            self.until_s = time.perf_counter() + BODY_S  # anew for each, as in `take_body`: many may take minutes
            return
        message.Recv(nowhere(nbytes))
        why = f"{name_of_tag(self.tag)} from rank {self.source}: {nbytes} bytes, expected {room.nbytes}"
        self._error = PeerError(why, self.source)

    def miss(self, tag: int) -> None:
        why = f"rank {self.source} sent a header without {name_of_tag(self.tag)}: {name_of_tag(tag)} came"
        self._error = PeerError(why, self.source)

    def is_whole(self) -> bool:
        if len(self._requests) == len(self._rooms):
            return bool(MPI.Request.Testall(self._requests))
        return self._error is not None or time.perf_counter() > self.until_s

    def check(self) -> None:
        if len(self._requests) < len(self._rooms):
            MPI.Request.Waitall(self._requests)  # their memory will be used again
            name = name_of_tag(self.tag)
            why = f"rank {self.source} sent a header without {name}: nothing came for {BODY_S:g} s"
            raise self._error or PeerError(why, self.source)


class OpenMessage:
    def __init__(self, sending: Sending, add: Callable[[Sending, Any], None]) -> None:
        self._sending = sending
        self._add = add

    def add(self, body: Any) -> None:
        self._add(self._sending, body)

    def close(self) -> Sending:
        return self._sending


class Receiving(Transfer):
    """A message with posted receives, the header's first.

    `rooms`: bytes of room for each body; `nbytes`: of all, by the header; 0 = empty. A single body may be shorter than its room.
    """

    __slots__ = ("buffer", "layout", "nbytes", "requests", "rooms", "source")

    def __init__(self, source: int, layout: Layout, buffer: bytearray, requests: list[MPI.Request], rooms: list[int]) -> None:
        self.source = source
        self.layout = layout
        self.buffer = buffer
        self.requests = requests
        self.rooms = rooms
        self.nbytes = 0

    @property
    def peer(self) -> int:
        return self.source

    def arrived(self) -> bool:
        return bool(self.requests[0].Test())

    def withdraw(self) -> None:
        for request in self.requests:
            request.Cancel()
            request.Wait()

    def describe(self, name: Callable[[int], str]) -> str:
        tag = next(Tag(each).name for each, known in LAYOUTS.items() if known is self.layout)
        return f"waits for {tag} of {name(self.source)}"

    def check(self, at: int, nbytes: int) -> None:
        """Check a body's received bytes. Raises PeerError: too short, on which MPI is silent (TRAPS 9)."""
        expected = min(self.rooms[at], self.nbytes)
        if nbytes != expected:
            raise PeerError(f"{name_of_tag(self.layout.body)} from rank {self.source}: {nbytes} bytes, expected {expected}")


def of_size(error: MPI.Exception, transfer: Sending | Receiving, part: str) -> Exception:
    """Return PeerError if a message was longer than its memory, else the error itself."""
    if not isinstance(transfer, Receiving) or error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
        return error
    tag = next(Tag(each).name for each, known in LAYOUTS.items() if known is transfer.layout)
    return PeerError(f"{tag} from rank {transfer.source}: the {part} is longer than expected")


def nowhere(nbytes: int) -> Any:
    """Return memory for an unwanted message: little, which a long message overwrites."""
    if nbytes <= _SINK:
        return bytearray(nbytes)
    times, rest = divmod(nbytes, _SINK)
    block = MPI.BYTE.Create_contiguous(_SINK)
    again, last = block.Create_hvector(times, 1, 0), MPI.BYTE.Create_contiguous(rest)
    return [bytearray(_SINK), 1, MPI.Datatype.Create_struct([1, 1], [0, 0], [again, last]).Commit()]
