"""Blocking messages over MPI: how a rank waits, checks, and can be watched.

Transfers are uppercase buffer calls on numpy arrays, or with a CUDA-aware MPI on GPU tensors. Switches: `environment.md`.

A *polite* wait leaves the core to working ranks (`politeness.py`), until a message is whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Pattern
from mpisgd.comm.messages import LAYOUTS, Fields, Layout, Tag
from mpisgd.comm.mpi import segment, ulfm
from mpisgd.comm.mpi.clock import Clock
from mpisgd.comm.mpi.collectives import Team
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.message_queue import Arrivals, never
from mpisgd.comm.mpi.segment import Segment
from mpisgd.comm.mpi.transfers import BODY_S, IncomingBodies, OpenMessage, Outbox, Receiving, Sending, name_of_tag, nowhere, of_size
from mpisgd.comm.politeness import BODY_SLEEP_S, SLEEP_MOST_S, Politeness
from mpisgd.comm.presence import Presence
from mpisgd.comm.waiting import Printed, Waiting

HUB = 0
"""The rank at which all meet: the first shard, a vital rank."""
_HEARING: tuple[Pattern, ...] = ((None, None), (None, Tag.INTERRUPT))
"""Last patterns that a signal answers, too."""


class Wire:
    """A rank's end of the communicator."""

    def __init__(self, comm: MPI.Intracomm, *, polite: bool, ranks_per_core: float = 1.0, hosts: Sequence[str] = ()) -> None:
        self._comm = comm
        politeness = Politeness(ranks_per_core)
        self._politely = politeness.until
        self.rank: int = comm.Get_rank()
        self.nodes = hosts
        wait = os.environ.get("MPISGD_WAIT", "polite" if polite else "blocking")
        self.polite = wait == "polite"
        self._arrivals = Arrivals(comm, politeness, polite=self.polite)
        synchronous = os.environ.get("MPISGD_SSEND", "0") == "1"
        self._synchronous = synchronous
        self._start = comm.Issend if synchronous else comm.Isend
        self._outbox = Outbox() if self.polite and not synchronous else None
        self._printed = Printed(self.rank)
        self._status = MPI.Status()
        self._headers = {tag: bytearray(layout.nbytes) for tag, layout in LAYOUTS.items()}
        self._taken: tuple[int, Layout]
        self.clock = Clock(comm)
        self.presence = Presence()
        self.waiting = Waiting()
        self.signal = 0
        self.deaf = False
        self._signal_told = False

    # ----------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: np.ndarray) -> Sending:
        """Begin to send a message, an announced header always synchronously.

        From MPI's eager buffers a learner's pull would overtake its push, as shards take pulls first; seen: staleness 72 with 3
        learners, pushes starved.
        """
        layout = LAYOUTS[tag]
        begin = self._start
        header = layout.pack(fields)
        requests = [(self._comm.Issend if layout.announced else begin)(header, dest, tag)]
        for body in bodies:
            requests.append(begin(body, dest, layout.body))
        self._printed.say(dest, tag, *bodies)
        outbox = self._outbox if self._outbox is not None and len(bodies) == 1 and bodies[0] is self._outbox.newest else None
        if outbox is not None:
            outbox.keep(requests)
        return Sending(dest, tag, layout.announced, requests, outbox)

    def aside(self, body: np.ndarray) -> np.ndarray:
        """Copy a body if waits are polite: receivers may lack a core.

        GPU memory is not copied: it crosses to the host once already.
        """
        return self._outbox.copy(body) if self._outbox is not None and isinstance(body, np.ndarray) else body

    def open(self, dest: int, tag: int, fields: Fields) -> OpenMessage:
        return OpenMessage(self.start(dest, tag, fields), self._add)

    def _add(self, opened: Sending, body: np.ndarray) -> None:
        tag = LAYOUTS[opened.tag].body
        opened.requests.append(self._start(body, opened.dest, tag))
        self._printed.say(opened.dest, tag, body)

    # -------------------------------------------------------------------------------------------------------- receive

    def post(self, source: int, tag: int, *bodies: np.ndarray) -> Any:
        """Post receives of exactly these sizes; bodies alone are posted by `take`."""
        layout = LAYOUTS.get(tag)
        if layout is None:
            return IncomingBodies(source, tag, bodies)
        buffer = bytearray(layout.nbytes)
        receive = self._comm.Irecv
        requests, rooms = [receive(buffer, source, tag)], []
        for body in bodies:
            requests.append(receive(body, source, layout.body))
            rooms.append(body.nbytes)
        return Receiving(source, layout, buffer, requests, rooms)

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, bodies: tuple[np.ndarray, ...] = ()) -> Receiving:
        answer: Receiving = self.post(dest, answer_tag, *bodies)
        answer.requests += self.start(dest, tag, fields).requests
        return answer

    def header(self, posted: Receiving) -> Fields:
        self.waiting.awaited = posted
        try:
            self._wait(posted.requests.pop(0))
        except MPI.Exception as error:
            raise of_size(error, posted, "header") from None
        self.waiting.goes_on()
        fields = posted.layout.unpack(posted.buffer, posted.source)
        if posted.rooms:
            posted.nbytes = fields[-1]
        return fields

    def header_or_signal(self, posted: Receiving) -> None:
        """Wait politely, however ranks wait here."""
        request = posted.requests[0]
        try:
            self._politely(lambda: self.signal > 0 or request.Test() or None)
        except MPI.Exception as error:
            raise of_size(error, posted, "header") from None

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Take a message. Raises PeerError: no header's tag, another size or magic number."""
        self.waiting.awaited = patterns
        hears = self._hears if patterns[-1] in _HEARING else never
        over = hears if until_ns is None else lambda: hears() or self.clock.now_ns() >= until_ns
        probed: tuple[int, int, int, MPI.Message] | None = None
        if hears():
            pass
        elif coming:
            probed = self._arrivals.beside(patterns, coming, over)
        elif over is never:
            probed = self._arrivals.probe(patterns)
        else:
            probed = self._arrivals.until(patterns, over)
        self.waiting.goes_on()
        if probed is not None:
            return self._header(*probed)
        return self._interrupt() if hears() else None

    def _hears(self) -> bool:
        return self.signal > 0 and not (self._signal_told or self.deaf)

    def _interrupt(self) -> tuple[int, int, Fields]:
        self._signal_told = True
        return self.rank, Tag.INTERRUPT, (self.signal,)

    def _header(self, source: int, tag: int, nbytes: int, message: MPI.Message) -> tuple[int, int, Fields]:
        layout = LAYOUTS.get(tag)
        if layout is None:
            self._throw_away(source, nbytes, message)
            known = ", ".join(Tag(each).name for each in LAYOUTS)
            raise PeerError(f"rank {source} sent {name_of_tag(tag)}, {nbytes} bytes: expected one of {known}", source)
        buffer = self._headers[tag]
        self._receive(source, tag, nbytes, message, buffer, len(buffer))
        self._taken = (source, layout)
        return source, tag, layout.unpack(buffer, source)

    def take_body(self, *bodies: np.ndarray) -> bool:
        source, layout = self._taken
        for body in bodies:
            probed = self._arrivals.body(source, layout.body, time.perf_counter() + BODY_S)
            if probed is None:
                name = name_of_tag(layout.body)
                raise PeerError(f"rank {source} sent a header without {name}: nothing came for {BODY_S:g} s", source)
            self._receive(*probed, body, body.nbytes)
        return True

    def _receive(self, source: int, tag: int, nbytes: int, message: MPI.Message, into: Any, expected: int) -> None:
        self._check_size(source, tag, nbytes, message, expected)
        message.Recv(into)

    def _check_size(self, source: int, tag: int, nbytes: int, message: MPI.Message, expected: int) -> None:
        """Drop a message of wrong size and raise PeerError: a longer one would overwrite memory (TRAPS 9)."""
        if nbytes != expected:
            self._throw_away(source, nbytes, message)
            raise PeerError(f"{name_of_tag(tag)} from rank {source}: {nbytes} bytes, expected {expected}", source)

    def _throw_away(self, source: int, nbytes: int, message: MPI.Message) -> None:
        """Receive an unwanted message, which would hold up its sender."""
        message.Recv(nowhere(nbytes))

    # ----------------------------------------------------------------------------------------------------------- wait

    def finish(self, transfer: Sending | Receiving) -> bool:
        requests = transfer.requests
        if type(transfer) is Sending and transfer.outbox is not None:
            return True
        self.waiting.awaited = transfer
        try:
            self._wait_for_all(transfer, requests)
        except MPI.Exception as error:
            raise of_size(error, transfer, "body") from None
        self.waiting.goes_on()
        return True

    def _wait_for_all(self, transfer: Sending | Receiving, requests: list[MPI.Request]) -> None:
        if type(transfer) is Receiving and transfer.rooms:
            for at in range(len(transfer.rooms)):
                self._wait_politely(requests[at], BODY_SLEEP_S, self._status) if self.polite else requests[at].Wait(self._status)
                transfer.check(at, self._status.Get_elements(MPI.BYTE))
            requests = requests[len(transfer.rooms) :]
        if self.polite:
            if type(transfer) is Sending and transfer.announced:
                self._wait(requests.pop(0))
            for request in requests:
                self._wait_politely(request, BODY_SLEEP_S)
        elif len(requests) == 1:
            requests[0].Wait()
        elif requests:
            MPI.Request.Waitall(requests)

    def meet(self) -> None:
        self._wait(self._comm.Ibarrier())

    def settle(self, said: np.ndarray, decide: Callable[[np.ndarray], np.ndarray], size: int, busy_s: float = 0.0) -> np.ndarray:
        """Return rank 0's decision, int64 (size,), on the words of all, int64 (ranks, n).

        `busy_s`: how long living ranks may take to come.
        """
        if self._outbox is not None:
            self._outbox.empty()
        is_hub = self._comm.Get_rank() == HUB
        table = np.zeros((self._comm.Get_size() if is_hub else 0, len(said)), np.int64)
        self._wait(self._comm.Igather(said, table, root=HUB))
        decided = decide(table) if is_hub else np.zeros(size, np.int64)
        self._wait(self._comm.Ibcast(decided, root=HUB))
        return decided

    def part(self) -> None:
        """Leave with all others: with ULFM, leaving counts as failing, which must mean nothing to them any more."""
        if ulfm.enabled():
            try:
                self._wait(self._comm.Ibarrier())
            except MPI.Exception as error:
                if not ulfm.is_failure(error):
                    raise

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], cuts: Sequence[tuple[int, int]] = ()) -> Team:
        return Team(self._wait_together, self._printed, self._group(ranks), bounds, cuts, synchronous=self._synchronous)

    def segment(self, ranks: Sequence[int], sizes: Sequence[int]) -> Segment | None:
        return segment.share(self._wait_together, self._group(ranks), sizes)

    def _wait(self, request: MPI.Request) -> None:
        if self.polite:
            self._wait_politely(request, SLEEP_MOST_S)
        else:
            request.Wait()

    def _group(self, ranks: Sequence[int]) -> MPI.Intracomm:
        return self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))

    def _wait_together(self, words: str, request: MPI.Request, *, moves: bool = False) -> None:
        self.waiting.awaited = words
        if moves and self.polite:
            self._wait_politely(request, BODY_SLEEP_S)
        else:
            self._wait(request)
        self.waiting.goes_on()

    def _wait_politely(self, request: MPI.Request, most_s: float, status: MPI.Status | None = None) -> None:
        self._politely(lambda: request.Test(status) or None, most_s)
