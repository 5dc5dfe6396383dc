"""Some ranks at work, while others wait without using a core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire


@contextmanager
def among(comm: MPI.Intracomm, ranks: Sequence[int]) -> Iterator[MPI.Intracomm | None]:
    """Yield a communicator of these ranks, in order; None elsewhere. All ranks enter and leave together."""
    part = comm.Create_group(comm.Get_group().Incl(list(ranks))) if comm.Get_rank() in ranks else None
    yield part
    if part is not None:
        part.Free()
    Wire(comm, polite=True).meet()
