"""Blocking messages over an MPI communicator: how a rank waits, what is checked, what can be switched on to watch it.

This is the communicator that `channel.py` talks to; a virtual cluster offers the same methods. Every transfer is an uppercase
buffer call on a numpy array. Environment switches:

- `MPISGD_SSEND=1`: every send is `MPI_Ssend`, so that nothing rests on MPI's eager buffering (law 1);
- `MPISGD_MESSAGES=1`: every message is printed: `r3 -> 0 GRADIENT 12.4 MB`;
- `MPISGD_WAIT=blocking|polite`: how to wait; by default polite where a node has more ranks than cores.

A *polite* wait probes, then yields the core, then sleeps for short, growing times, so that a waiting rank does not starve a
working one (TRAPS 3, 4). Only the wait for a message to *begin* is polite; a transfer under way is left to MPI.
"""

from __future__ import annotations

import enum
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpisgd.errors import PeerError
from mpisgd.mpi import MPI

_SPIN_S = 20e-6
_YIELD_S = 1e-3
_SLEEP_LEAST_S = 20e-6
_SLEEP_MOST_S = 1e-3


class Envelope(NamedTuple):
    """A message that has arrived but is not yet received; hand it to `accept`."""

    source: int
    tag: int
    nbytes: int
    message: Any


class Wire:
    """One rank's end of the communicator.

    Args:
        comm: an mpi4py communicator.
        polite: how this rank waits, unless MPISGD_WAIT says otherwise.
        tags: the vocabulary, for printing messages.
    """

    def __init__(self, comm: MPI.Intracomm, *, polite: bool, tags: type[enum.IntEnum]) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        wait = os.environ.get("MPISGD_WAIT", "polite" if polite else "blocking")
        self.polite = wait == "polite"
        self._synchronous = os.environ.get("MPISGD_SSEND", "0") == "1"
        self._send = comm.Ssend if self._synchronous else comm.Send
        self._start = comm.Issend if self._synchronous else comm.Isend
        self._print = os.environ.get("MPISGD_MESSAGES", "0") == "1"
        self._tags = tags
        self._status = MPI.Status()
        self._wanted: dict[tuple[tuple[int | None, int | None], ...], list[tuple[int, int]]] = {}
        self._zero_ns = time.perf_counter_ns()

    # ------------------------------------------------------------------------------------------------------- seconds

    def start_clock(self) -> None:
        """All ranks meet; seconds count from here."""
        self.meet()
        self._zero_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        """Nanoseconds since `start_clock`."""
        return time.perf_counter_ns() - self._zero_ns

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # ----------------------------------------------------------------------------------------------------------- send

    def send(self, array: np.ndarray, dest: int, tag: int) -> None:
        """Send and wait until the buffer may be used again."""
        self._tell(array, dest, tag)
        self._send(array, dest, tag)

    def announce(self, array: np.ndarray, dest: int, tag: int) -> MPI.Request:
        """Begin to send a header to a receiver that may be busy with others for long.

        The send is always synchronous: `wait` for it ends, politely, when the receiver has taken the header, and what was sent
        after it then needs no more waiting than its transfer. From MPI's eager buffers a learner's pull would overtake its own
        push, for a shard takes pulls first; seen: staleness 72 with 3 learners, pushes starved.
        """
        self._tell(array, dest, tag)
        return self._comm.Issend(array, dest, tag)

    def start_send(self, array: np.ndarray, dest: int, tag: int) -> MPI.Request:
        """Begin to send; the buffer must stay as it is until `finish`."""
        self._tell(array, dest, tag)
        return self._start(array, dest, tag)

    # -------------------------------------------------------------------------------------------------------- receive

    def post_receive(self, array: np.ndarray, source: int, tag: int) -> MPI.Request:
        """Tell MPI where a message of exactly this size is to go when it comes."""
        return self._comm.Irecv(array, source, tag)

    def probe(self, *patterns: tuple[int | None, int | None]) -> Envelope:
        """Wait until a message of one of these (source, tag) has arrived; take it out of the queue, do not receive it yet.

        None stands for any source or any tag.
        """
        status, improbe = self._status, self._comm.Improbe
        wanted = self._wanted.get(patterns)
        if wanted is None:
            wanted = [(MPI.ANY_SOURCE if s is None else s, MPI.ANY_TAG if t is None else t) for s, t in patterns]
            self._wanted[patterns] = wanted

        def ready() -> MPI.Message | None:
            for source, tag in wanted:
                if (message := improbe(source, tag, status)) is not None:
                    return message
            return None

        message: MPI.Message | None = None
        if self.polite:
            message = _politely(ready)
        elif len(wanted) == 1:
            message = self._comm.Mprobe(*wanted[0], status)
        while message is None:
            message = ready()
        return Envelope(status.source, status.tag, status.Get_count(MPI.BYTE), message)

    def accept(self, envelope: Envelope, array: np.ndarray) -> None:
        """Receive a probed message.

        Raises PeerError where its size is not the buffer's: a longer one would overwrite memory (TRAPS 9).
        """
        if envelope.nbytes != array.nbytes:
            raise PeerError(
                f"{self._name(envelope.tag)} from rank {envelope.source}: {envelope.nbytes} bytes, expected {array.nbytes}"
            )
        envelope.message.Recv(array)

    # ----------------------------------------------------------------------------------------------------------- wait

    def wait(self, request: MPI.Request) -> None:
        """Wait for one request, politely if need be."""
        if self.polite:
            _politely(lambda: request.Test() or None)
        else:
            request.Wait()

    def finish(self, requests: list[MPI.Request]) -> None:
        """Wait for transfers that are under way."""
        if len(requests) == 1:
            requests[0].Wait()
        elif requests:
            MPI.Request.Waitall(requests)

    def meet(self) -> None:
        """A barrier at which ranks wait politely."""
        self.wait(self._comm.Ibarrier())

    # ---------------------------------------------------------------------------------------------------------- print

    def _name(self, tag: int) -> str:
        return self._tags(tag).name if tag in self._tags.__members__.values() else f"tag {tag}"

    def _tell(self, array: np.ndarray, dest: int, tag: int) -> None:
        if self._print:
            print(f"r{self.rank} -> {dest} {self._name(tag)} {array.nbytes / 1e6:.6g} MB", file=sys.stderr, flush=True)


def _politely(ready: Callable[[], Any]) -> Any:
    """Call `ready` until it gives something: at once, then yielding the core, then with short, growing sleeps."""
    result = ready()
    if result is not None:
        return result
    start = time.perf_counter()
    sleep_s = _SLEEP_LEAST_S
    while True:
        result = ready()
        if result is not None:
            return result
        waited_s = time.perf_counter() - start
        if waited_s > _YIELD_S:
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, _SLEEP_MOST_S)
        elif waited_s > _SPIN_S:
            os.sched_yield()
