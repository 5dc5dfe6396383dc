"""A rank's clock; most libraries move no transfers while a rank computes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from mpisgd.comm import communicator
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.politeness import SLEEP_MOST_S

_EVERY_S = 200e-6
"""At 10 Gbit/s 250 kB come meanwhile, which the kernel's buffers hold."""


class Clock(communicator.Clock):
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._check: Callable[[], None] | None = None
        self._mover: Mover | None = None
        self._zero_ns = time.perf_counter_ns()

    @property
    def calls(self) -> bool:
        return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        meet()
        self._zero_ns = time.perf_counter_ns() - math.ceil(already_s * 1e9)

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._zero_ns

    def sleep(self, seconds: float) -> None:
        if self._check is None:
            time.sleep(seconds)
            return
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self._check()
            time.sleep(min(left, SLEEP_MOST_S))

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call `check` at least every millisecond of a sleep."""
        self._check = check

    def let_move(self, send: Callable[[], None] | None = None) -> None:
        if self._mover is None:
            self._mover = Mover(self._comm)
        self._mover.let_move(send)

    def hold(self) -> None:
        if self._mover is not None:
            self._mover.hold()


class Mover:
    """A thread that calls MPI between `let_move` and `hold`, never at the same time as the rank.

    Without MPI_THREAD_SERIALIZED nothing moves until the rank calls MPI. The thread ends at an MPI failure, which the rank's own
    calls report, too.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._look, self._rank = comm.Iprobe, comm.Get_rank()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._moves = False
        self._send: Callable[[], None] | None = None
        if MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
            threading.Thread(target=self._run, name="mover", daemon=True).start()

    def let_move(self, send: Callable[[], None] | None) -> None:
        if not self._moves:
            self._moves, self._send = True, send
            self._turn.release()

    def hold(self) -> None:
        if self._moves:
            self._moves = False
            self._turn.acquire()  # waits for one look at most

    def _run(self) -> None:
        with contextlib.suppress(MPI.Exception):
            while True:
                with self._turn:
                    self._look(self._rank, 0)  # for a message that nobody sends
                    if self._send is not None:
                        self._send()
                time.sleep(_EVERY_S)
