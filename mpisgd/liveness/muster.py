"""Arrival of ranks at `mpisgd.train`: missing ranks are named after seconds, ranks with an ended program at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mpisgd.base.errors import ConfigError
from mpisgd.base.terminal import warn
from mpisgd.liveness import absent
from mpisgd.liveness.guard import ranges

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

PATIENCE_S = 10.0
_HERE = 32_101
"""Tag of an arriving rank's message to ranks 0 and 1."""
_WORD = np.zeros(1, np.uint8)
_LOOK_S = 0.01
_EVERY = "call train() on every rank of the job, never below `if rank == 0:`"


def muster(comm: MPI.Intracomm) -> None:
    """Wait until all ranks are here. Raises ConfigError: a program on this node ended."""
    absent.came.append(True)
    rank, size = comm.Get_rank(), comm.Get_size()
    for dest in range(min(2, size)):
        if dest != rank:
            comm.Isend(_WORD, dest, _HERE).Free()
    here, deadline_s = {rank}, time.monotonic() + PATIENCE_S
    all_here = comm.Ibarrier()
    while not all_here.Test():
        if gone := absent.gone():
            raise ConfigError(f"rank {ranges(gone)} ended without mpisgd.train(): {_EVERY}")
        here |= _heard(comm)
        missing = [each for each in range(size) if each not in here]
        if time.monotonic() > deadline_s and (rank == 0 or missing == [0]) and rank < 2:
            warn(f"mpisgd: waiting for rank {ranges(missing)} to call mpisgd.train(): {_EVERY}")
            deadline_s += 30 * PATIENCE_S
        time.sleep(_LOOK_S)
    _heard(comm)


def _heard(comm: MPI.Intracomm) -> set[int]:
    from mpisgd.comm.mpi.library import MPI

    found, status = set[int](), MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, _HERE, status):
        comm.Recv(_WORD, status.Get_source(), _HERE)
        found.add(status.Get_source())
    return found
