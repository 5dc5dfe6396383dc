"""Leaves a job that has ended in order, on several nodes, even where a link goes down at that moment.

`MPI_Finalize` waits for all ranks, and mpirun for its daemons, with no other deadline than TCP's: a quarter of an hour or more. By
then all is said and written, so nobody is waited for longer than `LEAVE_S`. With ULFM nobody finalizes, and only mpirun waits.
"""

from __future__ import annotations

import faulthandler

from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.siblings import Siblings, on_several_nodes
from mpisgd.liveness import usher
from mpisgd.liveness.guard import launched_rank, leave_within

LEAVE_S = 15.0
"""Seconds for `MPI_Finalize`; what the process does after it has as long as it wants."""


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
