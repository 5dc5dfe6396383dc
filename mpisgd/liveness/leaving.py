"""Leaves a job that has ended in order, on all nodes, even where a link goes down at that moment.

`MPI_Finalize` waits for all ranks, and mpirun for its daemons, with no other deadline than TCP's: a quarter of an hour or more. By
then all is said and written, so nobody is waited for longer than `LEAVE_S`. With ULFM nobody finalizes, and only mpirun waits.
"""

from __future__ import annotations

from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.siblings import Siblings, on_several_nodes
from mpisgd.liveness import usher
from mpisgd.liveness.guard import launched_rank, leave_within

LEAVE_S = 15.0


def leave() -> None:
    """Let MPI end here; by each rank of a job on several nodes, of a process that has nothing else to do."""
    if not on_several_nodes():
        return
    siblings = Siblings()
    if launched_rank() == 0 and siblings.launcher_of_this_job:
        usher.see_out(siblings.launcher)
    if not ulfm.enabled():
        from mpisgd.comm.mpi.library import MPI

        leave_within(LEAVE_S)
        MPI.Finalize()
