"""Arrival of ranks at `mpisgd.train`: missing ranks are named after seconds, ended programs at once."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from mpisgd.base.errors import ConfigError
from mpisgd.base.terminal import warn
from mpisgd.comm.mpi.node_processes import start_s, unless_dumping, within
from mpisgd.liveness import absent
from mpisgd.liveness.guard import ranges

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

PATIENCE_S = 10.0
_LATER_S = 5.0
"""So much after ranks 0 and 1, which know who is missing, others speak; after as much again, ranks leave that hang in MPI."""
_HERE = 32_101
"""Tag of an arriving rank's message to ranks 0 and 1."""
_WORD = np.zeros(1, np.uint8)
_LOOK_S = 0.01
_EVERY = "call train() on every rank of the job, never below `if rank == 0:`"


def muster(comm: MPI.Intracomm) -> None:
    """Wait until all ranks are here. Raises ConfigError: a program ended, or ranks are late."""
    absent.came.append(True)
    limit_s = start_s()
    with within(unless_dumping(limit_s and limit_s + 2 * _LATER_S)):
        _await_all(comm, limit_s or math.inf)


def _await_all(comm: MPI.Intracomm, limit_s: float) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    for dest in range(min(2, size)):
        if dest != rank:
            comm.Isend(_WORD, dest, _HERE).Free()
    here, all_here = {rank}, comm.Ibarrier()
    warn_s = time.monotonic() + PATIENCE_S
    until_s = time.monotonic() + limit_s + (_LATER_S if rank > 1 else 0)
    while not all_here.Test():
        if gone := absent.gone():
            raise ConfigError(f"rank {ranges(gone)} ended without mpisgd.train(): {_EVERY}")
        here |= _heard(comm)
        missing = [each for each in range(size) if each not in here]
        if time.monotonic() > until_s:
            who = f"rank {ranges(missing)}" if missing and rank < 2 else "another rank"
            raise ConfigError(
                f"{who} has not called mpisgd.train() within {limit_s:g} s: a node is unreachable, or MPISGD_START_S too short"
                f" (0 = wait for ever); {_EVERY}"
            )
        if time.monotonic() > warn_s and missing and (rank == 0 or (rank == 1 and missing == [0])):
            most = f", {limit_s:g} s at most (MPISGD_START_S)" if limit_s < math.inf else ""
            warn(f"mpisgd: waiting for rank {ranges(missing)} to call mpisgd.train(){most}: {_EVERY}")
            warn_s += 30 * PATIENCE_S
        time.sleep(_LOOK_S)
    _heard(comm)


def _heard(comm: MPI.Intracomm) -> set[int]:
    from mpisgd.comm.mpi.library import MPI

    found, status = set[int](), MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, _HERE, status):
        comm.Recv(_WORD, status.Get_source(), _HERE)
        found.add(status.Get_source())
    return found
