"""How ranks leave: alike, with one reason and one status; in order, on several nodes, even where a link goes down at that moment.

`MPI_Finalize` waits for all ranks, and mpirun for its daemons, with no other deadline than TCP's: a quarter of an hour or more. By
then all is said and written, so nobody is waited for longer than `LEAVE_S`. With ULFM nobody finalizes, and only mpirun waits.

Where several ranks of several nodes leave with a status that is not 0, Open MPI's launcher may stay for ever, one time in twelve;
on one node it did not in 1,300. So the first rank says the status for all.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpisgd.base.errors import EXIT_OK, MpisgdError, RunInterrupted
from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.siblings import Siblings, on_several_nodes
from mpisgd.liveness import usher
from mpisgd.liveness.guard import abort, launched_rank, launched_size, leave_within

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

LEAVE_S = 15.0
"""Seconds for `MPI_Finalize`; what the process does after it has as long as it wants."""

TOGETHER_S = 20.0
"""Seconds that a rank which refuses something waits for the others to do so, too."""

END_S = 60
"""Seconds for a script that has failed, and for MPI, to end."""


def leave() -> None:
    """End MPI here, where the job is on several nodes; by each rank, of a process that has nothing else to do.

    A rank that waits in `MPI_Finalize` for longer than `LEAVE_S` ends with EXIT_FAILED; DONE is true all the same.
    """
    if not on_several_nodes():
        return
    siblings = Siblings()
    if launched_rank() == 0 and siblings.launcher_of_this_job:
        usher.see_out(siblings.launcher)
    if not ulfm.enabled():
        from mpisgd.comm.mpi.library import MPI

        leave_within(LEAVE_S)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def as_one(comm: MPI.Intracomm | None) -> Iterator[None]:
    """Let the first rank tell, and say the status, of what all refuse alike in here, or of the signal that interrupts them.

    Whoever calls this may catch it: only where nobody does is that rank's traceback printed alone, and do the others leave with 0.

    `comm`: those ranks; None = all.
    """
    try:
        yield
    except RunInterrupted as interrupted:
        if not _is_first(comm):
            interrupted.code = EXIT_OK
        raise
    except MpisgdError as refused:
        if launched_size() > 1 and (comm is None or comm.Get_size() > 1):
            before = sys.excepthook
            if isinstance(before, partial) and before.func is _uncaught:  # of an error that was caught: it is not kept
                before = before.args[0]
            sys.excepthook = partial(_uncaught, before, refused, comm)
        raise


def _is_first(comm: MPI.Intracomm | None) -> bool:
    """Whether this rank speaks for all of these; by the launcher's number where they are all, since MPI may not have started."""
    return (launched_rank() if comm is None else comm.Get_rank()) == 0


def _uncaught(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    refused: MpisgdError,
    comm: MPI.Intracomm | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """In the place of `sys.excepthook`, `before`. Raises SystemExit, with which Python then leaves."""
    if error is not refused:
        before(kind, error, trace)
        return
    if _is_first(comm):
        before(kind, error, trace)
    status = leave_together(refused.exit_status, f"{kind.__name__}: {error}", comm)
    ulfm.leave(status)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Python's own watch over hangs is gone when MPI finalizes
    signal.alarm(END_S)
    raise SystemExit(status)


def leave_together(status: int, reason: str, comm: MPI.Intracomm | None = None) -> int:
    """Wait for the other ranks, so that the launcher does not end the first rank before it has told what is wrong.

    Where they do not come, they did not refuse what this one did (a file that it alone cannot read): then it ends the job.

    Args:
        comm: those ranks; None = all.

    Returns with which status this rank is to leave: where all have met, the first one's is the job's, and the others leave with 0.
    """
    sys.stderr.flush()
    from mpisgd.comm.mpi.library import MPI

    first, comm = _is_first(comm), MPI.COMM_WORLD if comm is None else comm
    if ulfm.enabled() and ulfm.failed(comm):  # those who are left have met before (`tolerant.py`)
        return status
    together = comm.Ibarrier()
    patient_until_s = time.monotonic() + TOGETHER_S
    while not _have_come(together):
        if time.monotonic() > patient_until_s:
            who = f"rank {launched_rank()} on {socket.gethostname()}"
            print(f"mpisgd: {who} alone refuses, the job is ended\n{reason}", file=sys.stderr, flush=True)
            abort(comm, status)
        time.sleep(0.005)
    return status if first else EXIT_OK


def _have_come(together: MPI.Request) -> bool:
    """Whether all have met; who has left already looks, where MPI tells of failures, as if it had failed."""
    from mpisgd.comm.mpi.library import MPI

    try:
        return bool(together.Test())
    except MPI.Exception as error:
        if not ulfm.is_failure(error):
            raise
        return True
