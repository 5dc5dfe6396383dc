"""A rank's clock and sleeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mpisgd.comm import communicator
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.mover import Mover
from mpisgd.comm.politeness import SLEEP_MOST_S


class Clock(communicator.Clock):
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._check: Callable[[], None] | None = None
        self._mover: Mover | None = None
        self._zero_ns = time.perf_counter_ns()

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

    def let_move(self) -> None:
        if self._mover is None:
            self._mover = Mover(self._comm)
        self._mover.let_move()

    def hold(self) -> None:
        if self._mover is not None:
            self._mover.hold()
