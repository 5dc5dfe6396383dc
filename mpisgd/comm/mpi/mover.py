"""A thread that lets MPI move what is under way while a rank computes: most libraries move nothing outside of their own calls."""

from __future__ import annotations

import contextlib
import threading
import time

from mpisgd.comm.mpi.library import MPI

_EVERY_S = 200e-6
"""Between two looks. At 10 Gbit/s 250 kB have come meanwhile, which the kernel's buffers hold."""


class Mover:
    """Calls MPI from time to time between `let_move` and `hold`, and never at the same time as the rank itself.

    Where the library allows calls of one thread alone, nothing moves until the rank calls it again. The thread ends where MPI says
    that something has failed: the rank's own calls will say so, too.
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
        """Wait, at most for one look, until the thread calls MPI no more."""
        if self._moves:
            self._moves = False
            self._turn.acquire()

    def _run(self) -> None:
        with contextlib.suppress(MPI.Exception):
            while True:
                with self._turn:
                    self._look(self._rank, 0)  # for a message that nobody sends
                time.sleep(_EVERY_S)
