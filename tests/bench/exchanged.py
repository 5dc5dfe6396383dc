"""`python -m tests.bench.exchanged`, on ranks: how fast cores move bytes between memory and MPI, without a model.

Each rank sends NBYTES to another one, in pieces, and as many come from one, at the same time, out of memory that no cache has.
Where a node has one rank, that is the next one's, over TCP; where it has two, they send to each other. Rank 0 prints the bytes per
second of its node, in and out of it together, or copied on it; the median of several times.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.together import PIECE_NBYTES

NBYTES = 22_000_000
TIMES = 9
SAID = "bytes per second of a node: "


def seconds(comm: MPI.Comm, sent: np.ndarray, received: np.ndarray, piece_nbytes: int) -> float:
    """Of one exchange, with the rank before and the next one."""
    rank, size = comm.Get_rank(), comm.Get_size()
    comm.Barrier()
    start_s = time.perf_counter()
    pieces = range(0, NBYTES, piece_nbytes)
    requests = [comm.Irecv(received[at : at + piece_nbytes], (rank - 1) % size) for at in pieces]
    requests += [comm.Isend(sent[at : at + piece_nbytes], (rank + 1) % size) for at in pieces]
    MPI.Request.Waitall(requests)
    return time.perf_counter() - start_s


def main() -> None:
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    comm, piece_nbytes = (world, PIECE_NBYTES) if node.Get_size() == 1 else (node, NBYTES)
    sent, received = (np.ones((TIMES, NBYTES), np.uint8) for _ in range(2))
    world.Barrier()
    found = [seconds(comm, *each, piece_nbytes) for each in zip(sent, received, strict=True)]
    if world.Get_rank() == 0:
        print(f"{SAID}{2 * NBYTES / statistics.median(found):.0f}", flush=True)


if __name__ == "__main__":
    main()
