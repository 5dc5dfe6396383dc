"""`python -m tests.bench.exchanged`, on ranks: how fast bytes move between memory and MPI, without a model.

Where each node has one rank, each sends a slice of NBYTES to every other one, in pieces, and receives as much, out of memory that
no cache has: as an allreduce does in each of its halves. Where a node has two, they send to each other. Rank 0 prints the bytes per
second of its node, in and out of it together, or copied on it; the median of several times.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from mpisgd.comm import pieces
from mpisgd.comm.mpi.library import MPI

NBYTES = 44_000_000
TIMES = 9
SAID = "bytes per second of a node: "


def seconds(comm: MPI.Comm, sent: np.ndarray, received: np.ndarray, most_nbytes: int) -> float:
    """Of one exchange, in messages of so many bytes at most, the slices of all ranks in turn."""
    rank, size = comm.Get_rank(), comm.Get_size()
    comm.Barrier()
    start_s = time.perf_counter()
    others = [(rank + away) % size for away in range(1, size)]
    places = [slice(at, at + most_nbytes) for at in range(0, sent.shape[1], most_nbytes)]
    requests = [comm.Irecv(received[other][place], other) for other in others for place in places]
    requests += [comm.Isend(sent[other][place], other) for place in places for other in others]
    MPI.Request.Waitall(requests)
    return time.perf_counter() - start_s


def main() -> None:
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    comm, most_nbytes = (world, pieces.NBYTES) if node.Get_size() == 1 else (node, NBYTES)
    size = comm.Get_size()
    sent, received = (np.ones((TIMES, size, NBYTES // size), np.uint8) for _ in range(2))
    world.Barrier()
    found = [seconds(comm, *each, most_nbytes) for each in zip(sent, received, strict=True)]
    if world.Get_rank() == 0:
        print(f"{SAID}{2 * NBYTES * (size - 1) / size / statistics.median(found):.0f}", flush=True)


if __name__ == "__main__":
    main()
