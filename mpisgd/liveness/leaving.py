"""How ranks leave: alike, with one reason and status; on several nodes, even if a link fails just then.

`MPI_Finalize` waits for all ranks, and mpirun for its daemons, as long as TCP: a quarter of an hour or more. All is written by
then, so no rank waits beyond `LEAVE_S`. With ULFM nobody finalizes; only mpirun waits.

If ranks of several nodes leave with nonzero status, Open MPI's launcher may hang (TRAPS 11): the first rank says
the status for all.
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
from mpisgd.comm.mpi.node_processes import NodeProcesses, leave_within, on_several_nodes
from mpisgd.liveness import reaper
from mpisgd.liveness.guard import abort, launched_rank, launched_size, speak

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

LEAVE_S = 15.0
"""Seconds for `MPI_Finalize`, not for later work."""

TOGETHER_S = 20.0
"""Seconds that a refusing rank waits for the others' refusal."""

END_S = 60
"""Seconds for a failed script, and MPI, to end; the first rank's."""


def leave() -> None:
    """End MPI on several nodes, as each rank's last act.

    A rank in `MPI_Finalize` beyond `LEAVE_S` ends with EXIT_FAILED; DONE is true all the same.
    """
    if not on_several_nodes():
        return
    node_processes = NodeProcesses()
    if launched_rank() == 0 and node_processes.launcher_of_this_job:
        reaper.see_out(node_processes.launcher)
    if not ulfm.enabled():
        from mpisgd.comm.mpi.library import MPI

        leave_within(LEAVE_S)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def as_one(comm: MPI.Intracomm | None) -> Iterator[None]:
    """Let the first rank tell a refusal by all, or an interrupting signal, with its status.

    A refusal may be caught; if uncaught, the first rank's traceback is printed alone, and others leave with 0. `comm`: None = all.
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
            if isinstance(before, partial) and before.func is _uncaught:  # of an error that was caught: dropped
                before = before.args[0]
            sys.excepthook = partial(_uncaught, before, refused, comm)
        raise


def _is_first(comm: MPI.Intracomm | None) -> bool:
    """Return whether this rank speaks for all; without `comm`, MPI may not have started."""
    return (launched_rank() if comm is None else comm.Get_rank()) == 0


def _uncaught(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    refused: MpisgdError,
    comm: MPI.Intracomm | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Replace `sys.excepthook`, `before`. Raises SystemExit."""
    if error is not refused:
        before(kind, error, trace)
        return
    if _is_first(comm):
        before(kind, error, trace)
    status = leave_together(refused.exit_status, f"{kind.__name__}: {error}", comm)
    ulfm.leave(status)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Python's own watch over hangs is gone when MPI finalizes
    signal.alarm(END_S if _is_first(comm) else 2 * END_S)
    raise SystemExit(status)


def leave_together(status: int, reason: str, comm: MPI.Intracomm | None = None) -> int:
    """Wait for other ranks, lest the launcher end the first rank before its words.

    If the others do not come, this rank alone refuses (a file unreadable only here), and ends the job. Returns the job's status on
    the first rank, 0 on others.
    """
    sys.stderr.flush()
    from mpisgd.comm.mpi.library import MPI

    first, comm = _is_first(comm), MPI.COMM_WORLD if comm is None else comm
    if ulfm.enabled() and ulfm.failed(comm):  # the remaining ranks have met before (`tolerant.py`)
        return status
    together = comm.Ibarrier()
    patient_until_s = time.monotonic() + TOGETHER_S
    while not _have_come(together):
        if time.monotonic() > patient_until_s:
            who = f"rank {launched_rank()} on {socket.gethostname()}"
            speak(f"mpisgd: {who} alone refuses, the job is ended\n{reason}")
            abort(comm, status)
        time.sleep(0.005)
    return status if first else EXIT_OK


def _have_come(together: MPI.Request) -> bool:
    from mpisgd.comm.mpi.library import MPI

    try:
        return bool(together.Test())
    except MPI.Exception as error:
        if not ulfm.is_failure(error):  # a rank that has left looks failed
            raise
        return True
