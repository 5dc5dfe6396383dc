"""A watch over ranks that must all live, by MPI's failure reports (`ulfm.py`): a lost rank ends the job in seconds.

A thread asks MPI for failed ranks: always, but in a fault-tolerant run only at the start. Before MPI, `node_processes.py` watches.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from mpisgd.base.errors import EXIT_FAILED
from mpisgd.base.terminal import last_words
from mpisgd.comm.mpi import ulfm

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

LOOK_S = 0.1
OWN_S = 1.0
"""Seconds for a rank's own loop to say so (`guard.failing_fast`)."""
FORWARD_S = 0.5
END_S = 2.0
"""Seconds for a rank's loop to end after revocation."""


class FailureWatch:
    """A watch while open, or until `stop`."""

    def __init__(self, comm: MPI.Intracomm, who: Callable[[], str], way_on: Callable[[], str]) -> None:
        self._comm = comm
        self._who = who
        self._way_on = way_on
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure_watch", daemon=True)

    def __enter__(self) -> FailureWatch:
        if ulfm.enabled():
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        from mpisgd.comm.mpi.library import MPI

        while not self._over.wait(LOOK_S):
            MPI.COMM_SELF.Iprobe()  # MPI learns of failures only in calls: this rank may be importing torch
            if self._comm.Is_revoked():
                if not self._over.wait(END_S):
                    os._exit(EXIT_FAILED)
            elif ulfm.seen_failed(self._comm) and not self._over.wait(OWN_S):
                self._end()

    def _end(self) -> None:
        """Name lost ranks, unless an earlier rank does."""
        comm = self._comm
        rank, lost = comm.Get_rank(), ulfm.seen_failed(comm)
        if not ulfm.has_turn(comm, self._over.wait):
            return
        said = f"mpisgd: rank {rank} ({self._who()}) on {socket.gethostname()} sees that rank {', '.join(map(str, lost))} is lost"
        text = f"{said}, and here a run goes on only with all ranks: the job is ended\n{self._way_on()}"
        last_words(text.rstrip())
        time.sleep(FORWARD_S)
        ulfm.end_job(comm, EXIT_FAILED)
