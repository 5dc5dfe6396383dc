"""`mpirun -n 2 python -m tests.bench state`: CPU seconds of a state of AlexNet's shapes, on its own node and on a partner's.

Rank 0 writes and sends, rank 1 takes; neither trains. Both nodes' memory is this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisgd.bench.parts.measured import show, spread
from mpisgd.bench.parts.runs import scratch
from mpisgd.job.run.courier import Courier
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.near import Near

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

PARAMETERS = 61_000_000
"""With SGD's momentum, 488 MB."""
_TOLD = {"schema_version": 4, "attempt": 0, "learners": 1, "model": "alexnet"}


def measure(comm: MPI.Intracomm, repetitions: int, parameters: int = PARAMETERS) -> list[dict[str, Any]]:
    """CPU seconds of each of so many states, on both ranks; the rows are the same on every rank."""
    rank, spent, complaints = comm.Get_rank(), list[list[float]](), list[str]()
    tensors = {name: np.full(parameters if rank == 0 else 0, 1.5, np.float32) for name in ("weights", "optimizer.momentum_buffer")}
    with scratch(comm) as directory:
        near = Near(directory, "bench", f"node{rank}")
        courier = Courier(comm, {0} if rank == 1 else (), near.take, complaints.append)
        for clock in range(1, repetitions + 1):
            comm.Barrier()
            began_s = time.process_time()
            if rank == 0:
                account = Account(0, (0, parameters), clock, clock, 1.0, clock, [0], [1], [[0, 1, 1, 1, 1]], [])
                courier.send(1, clock, 0, near.write(account, 1, _TOLD, tensors))
            while rank == 1 and not near.files(clock, 0)[1].is_file() and not complaints:
                time.sleep(0.05)
            spent.append(comm.allgather(time.process_time() - began_s))
        held, said = comm.bcast([each.clock for each in near.held(0)], root=1), comm.bcast(complaints, root=1)
        courier.close()
        near.forget()
    if repetitions not in held:
        raise RuntimeError(f"the partner holds clocks {held}, expected {repetitions}: {'; '.join(said)}")
    here, there = zip(*spent, strict=True)
    ends = {"its node": here, "partner": there, "both": [sum(each) for each in spent]}
    cpu_s = {name: spread(each) for name, each in ends.items()}
    return [{"nbytes": 8 * parameters, "states": repetitions, "cpu_s": cpu_s}]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    ends = [", ".join(f"{name} {show(seconds)}" for name, seconds in row["cpu_s"].items()) for row in rows]
    return [f"a state of {row['nbytes'] / 1e6:.0f} MB, seconds of a core: {each}" for row, each in zip(rows, ends, strict=True)]
