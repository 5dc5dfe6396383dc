"""Links between nodes, timed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from mpisgd.comm import pieces
from mpisgd.comm.mpi.library import MPI

_NBYTES = 2**22
_FIRST_NBYTES = 2**16  # connects the ranks
_TIMES, _MOST_S = 5, 0.05
_LOOK_S = 1e-4


def rates_of(comm: MPI.Intracomm, ranks: Sequence[int], hosts: Sequence[str]) -> tuple[float, float]:
    """Return bytes per second of the slowest and the fastest link, each way; collective.

    In a ring, each node's first of `ranks` sends to the next node's.
    """
    ring = list({hosts[rank]: rank for rank in reversed(ranks)}.values())
    rank = comm.Get_rank()
    sent, received = np.ones((2, _NBYTES), np.uint8)

    def seconds(nbytes: int) -> tuple[float, float]:
        extremes = np.zeros(2)
        _wait(comm.Ibarrier())
        start_s, mine = time.perf_counter(), np.array([0.0, -math.inf])
        if rank in ring:
            at = ring.index(rank)
            coming = [comm.Irecv(piece, ring[(at + 1) % len(ring)]) for piece in pieces.of(received, 0, nbytes)]
            for request in coming + [comm.Isend(piece, ring[at - 1]) for piece in pieces.of(sent, 0, nbytes)]:
                _wait(request)
            took_s = time.perf_counter() - start_s
            mine = np.array([took_s, -took_s])
        _wait(comm.Iallreduce(mine, extremes, MPI.MAX))
        return float(extremes[0]), -float(extremes[1])

    seconds(_FIRST_NBYTES)
    found = [seconds(_NBYTES)]
    while len(found) < _TIMES and sum(most_s for most_s, _ in found) < _MOST_S:
        found.append(seconds(_NBYTES))
    most_s, least_s = min(found)
    return _NBYTES / most_s, _NBYTES / least_s


def _wait(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(_LOOK_S)  # ranks may share cores
