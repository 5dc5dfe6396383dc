"""Some ranks of a bench's job at work, while the others wait without using a core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire


@contextmanager
def among(comm: MPI.Intracomm, ranks: Sequence[int]) -> Iterator[MPI.Intracomm | None]:
    """The communicator of these ranks, in their order; None for the others. All ranks of `comm` call this, and leave together."""
    part = comm.Create_group(comm.Get_group().Incl(list(ranks))) if comm.Get_rank() in ranks else None
    yield part
    if part is not None:
        part.Free()
    Wire(comm, polite=True).meet()
