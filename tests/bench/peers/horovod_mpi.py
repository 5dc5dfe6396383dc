"""Horovod with MPI: an allreduce of gradients while the backward pass goes on. Weights that are not contiguous it refuses; images
may be channels-last.

`mpirun -n 2 python horovod_mpi.py CASE MU UPDATES`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from torch_networks import WARM_UP, Batches, make


def main(case: str, mu: int, updates: int) -> None:
    hvd.init()
    torch.set_num_threads(1)
    model, batches, start_s = make(case, torch.contiguous_format), Batches(mu, hvd.rank()), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            start_s = time.perf_counter()
        inputs, targets = batches.next()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(json.dumps({"images": mu * updates, "seconds": time.perf_counter() - start_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
