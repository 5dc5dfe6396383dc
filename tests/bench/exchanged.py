"""`python -m tests.bench.exchanged`, on ranks: how fast cores move bytes between memory and MPI's TCP, without a model.

Each rank sends NBYTES to the next one and as many come from the one before, in pieces, at the same time. Rank 0 prints the bytes
per second of one rank, into and out of it together; the median of several times.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.together import PIECE_NBYTES

NBYTES = 44_000_000
TIMES = 9
SAID = "bytes per second of a rank: "


def seconds(comm: MPI.Intracomm, sent: np.ndarray, received: np.ndarray) -> float:
    """Of one exchange, with the rank before and the next one."""
    rank, size = comm.Get_rank(), comm.Get_size()
    comm.Barrier()
    start_s = time.perf_counter()
    pieces = range(0, NBYTES, PIECE_NBYTES)
    requests = [comm.Irecv(received[at : at + PIECE_NBYTES], (rank - 1) % size) for at in pieces]
    requests += [comm.Isend(sent[at : at + PIECE_NBYTES], (rank + 1) % size) for at in pieces]
    MPI.Request.Waitall(requests)
    return time.perf_counter() - start_s


def main() -> None:
    comm = MPI.COMM_WORLD
    sent, received = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    found = [seconds(comm, sent, received) for _ in range(TIMES)]
    if comm.Get_rank() == 0:
        print(f"{SAID}{2 * NBYTES / statistics.median(found):.0f}", flush=True)


if __name__ == "__main__":
    main()
