"""A thread that moves transfers while a rank computes: most libraries move nothing outside their calls."""

from __future__ import annotations

import contextlib
import threading
import time

from mpisgd.comm.mpi.library import MPI

_EVERY_S = 200e-6
"""At 10 Gbit/s 250 kB come meanwhile, which the kernel's buffers hold."""


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
        if MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
            threading.Thread(target=self._run, name="mover", daemon=True).start()

    def let_move(self) -> None:
        if not self._moves:
            self._moves = True
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
                time.sleep(_EVERY_S)
