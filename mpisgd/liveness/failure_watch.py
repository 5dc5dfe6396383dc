"""A look at ranks that must all live, by MPI's failure reports (`ulfm.py`): a lost rank ends the job in seconds.

In a fault-tolerant run, only until the start. Before MPI, `node_processes.py` watches.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpisgd.base.errors import EXIT_FAILED
from mpisgd.comm.mpi import ulfm
from mpisgd.liveness.guard import speak
from mpisgd.liveness.watch import Look

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

OWN_S = 1.0
"""Seconds for a rank's own loop to say so (`guard.failing_fast`)."""
END_S = 2.0
"""Seconds for a rank's loop to end after revocation."""


class FailureWatch(Look):
    every_s = 0.1

    def __init__(self, comm: MPI.Intracomm, who: Callable[[], str], way_on: Callable[[], str]) -> None:
        super().__init__()
        self._comm = comm
        self._who = who
        self._way_on = way_on

    def begin(self) -> bool:
        return ulfm.enabled()

    def look(self) -> None:
        from mpisgd.comm.mpi.library import MPI

        MPI.COMM_SELF.Iprobe()  # MPI learns of failures only in calls: this rank may be importing torch
        if self._comm.Is_revoked():
            if not self.over.wait(END_S):
                os._exit(EXIT_FAILED)
        elif ulfm.seen_failed(self._comm) and not self.over.wait(OWN_S):
            self._end()

    def _end(self) -> None:
        """Name lost ranks, unless an earlier rank does."""
        comm = self._comm
        rank, lost = comm.Get_rank(), ulfm.seen_failed(comm)
        if not ulfm.has_turn(comm, self.over.wait):
            return
        said = f"mpisgd: rank {rank} ({self._who()}) on {socket.gethostname()} sees that rank {', '.join(map(str, lost))} is lost"
        speak(f"{said}, and here a run goes on only with all ranks: the job is ended", self._way_on)
        ulfm.end_job(comm, EXIT_FAILED)
