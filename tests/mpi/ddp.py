"""Run under mpirun: training runs by torch's DistributedDataParallel over gloo; of mpisgd only the data, networks and sampling.

`python ddp.py jobs.json`, a list of {"learners": n, "config": {...}, "record": path}. Rank 0 saves the weights before each update,
(updates, parameters). MPI says who is which rank, and no more.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mpisgd import data, models
from mpisgd.comm.mpi.library import MPI
from mpisgd.config import Config
from mpisgd.config.config_file import from_mapping
from mpisgd.data import sampling


def weights_before_each_update(config: Config, learner_id: int, lambda_: int, group: distributed.ProcessGroup) -> np.ndarray:
    """What it says, float32 (updates, parameters)."""
    data_set = data.load(config.data, seed=config.seed)
    model = models.make(config.model, input_shape=data_set.input_shape, classes=data_set.classes, seed=config.seed)
    replicas, options = DistributedDataParallel(model, process_group=group), vars(config.optimizer)
    steps = torch.optim.SGD(replicas.parameters(), lr=config.alpha0, **options)
    samples = len(data_set.train)
    deal = sampling.make(config.sampling, size=samples, mu=config.mu, lambda_=lambda_, seed=config.seed)
    seen = []
    for seq in range(math.ceil(config.epochs * samples / (lambda_ * config.mu))):
        seen.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy().copy())
        inputs, targets = data_set.train.batch(deal.indices(learner_id, seq))
        steps.zero_grad()
        torch.nn.functional.cross_entropy(replicas(inputs), targets).backward()  # type: ignore[no-untyped-call]
        steps.step()
    return np.array(seen)


def main() -> None:
    world, listing = MPI.COMM_WORLD, Path(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{listing.with_suffix('.rendezvous')}",
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=60),
    )
    for job in json.loads(listing.read_text()):
        group = distributed.new_group(range(job["learners"]))
        if world.rank < job["learners"]:
            seen = weights_before_each_update(from_mapping(job["config"]), world.rank, job["learners"], group)
            if world.rank == 0:
                np.save(job["record"], seen)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
