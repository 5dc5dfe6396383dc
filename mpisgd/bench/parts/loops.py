"""Yardsticks on the same ranks: loops without communication, and PyTorch's DistributedDataParallel over gloo.

Model, mini-batches, fused SGD and one thread each are the same.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import nn

from mpisgd import models
from mpisgd.bench.parts.cases import LEARNERS, SEED, WARM_UP, Case, Device
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire
from mpisgd.data import load, sampling
from mpisgd.gradient.gradient import Gradient
from mpisgd.vectors.flat import FlatModel

MemoryFormat = Literal["channels_last", "contiguous"]
_Step = Callable[[int], object]


def independent(
    comm: MPI.Intracomm,
    wire: Wire,
    case: Case,
    device: Device,
    memory_format: MemoryFormat = "channels_last",
    learners: int = LEARNERS,
) -> float:
    """Return images/s of learners that send nothing: the compute floor."""
    return _timed(comm, wire, case, lambda learner_id: alone(case, learner_id % LEARNERS, device, memory_format), learners)


def alone(case: Case, learner_id: int, device: Device = "cpu", memory_format: MemoryFormat = "channels_last") -> _Step:
    data = load(case.data, seed=SEED)
    module = models.make(case.model, input_shape=data.input_shape, classes=data.classes, seed=SEED)
    flat = FlatModel(module, memory_format, _own(device, learner_id))
    dealt = sampling.make("epoch", size=case.data.samples, mu=case.mu, lambda_=LEARNERS, seed=SEED)
    gradient = Gradient(flat, nn.functional.cross_entropy, data.train, dealt, flat.memory, seed=SEED, learner_id=learner_id)
    weights = nn.Parameter(flat.weights)
    weights.grad = flat.gradients
    optimizer = torch.optim.SGD([weights], lr=0.001, momentum=0.9, fused=True)

    def step(seq: int) -> None:
        gradient.compute(seq)
        optimizer.step()

    return step


def distributed(comm: MPI.Intracomm, wire: Wire, case: Case, device: Device, *, views: bool) -> float:
    """Return images/s of DistributedDataParallel; `views`: gradients are bucket views."""

    def make(learner_id: int) -> _Step:
        data = load(case.data, seed=SEED)
        module = models.make(case.model, input_shape=data.input_shape, classes=data.classes, seed=SEED)
        own = _own(device, learner_id)
        module = module.to(own, memory_format=torch.channels_last)  # type: ignore[call-overload]
        parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001, momentum=0.9, fused=True)
        dealt = sampling.make("epoch", size=case.data.samples, mu=case.mu, lambda_=LEARNERS, seed=SEED)

        def step(seq: int) -> None:
            inputs, targets = data.train.batch(dealt.indices(learner_id, seq))
            optimizer.zero_grad(set_to_none=not views)
            inputs = inputs.to(own, memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(parallel(inputs), targets.to(own))
            loss.backward()  # type: ignore[no-untyped-call]
            loss.item()
            optimizer.step()

        return step

    return _timed(comm, wire, case, make)


def _own(device: Device, learner_id: int) -> str:
    return device if device == "cpu" else f"cuda:{learner_id % torch.cuda.device_count()}"


def _timed(comm: MPI.Intracomm, wire: Wire, case: Case, make: Callable[[int], _Step], learners: int = LEARNERS) -> float:
    """Return images/s after the warm-up, by the slowest learner's seconds."""
    torch.set_num_threads(1)
    learner_id = comm.Get_rank() - 1
    step = make(learner_id) if 0 <= learner_id < learners else None
    if step is not None:
        for seq in range(WARM_UP):
            step(seq)
    wire.meet()
    start_s = time.perf_counter()
    if step is not None:
        for seq in range(WARM_UP, WARM_UP + case.updates):
            step(seq)
    own = np.array([time.perf_counter() - start_s if step is not None else 0.0])
    wire.meet()
    slowest = np.zeros(1)
    comm.Allreduce(own, slowest, MPI.MAX)
    return learners * case.updates * case.mu / float(slowest[0])


def join_gloo(comm: MPI.Intracomm) -> None:
    port = 0
    if comm.Get_rank() == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = comm.bcast(port, root=1)
    if comm.Get_rank() in (1, 2):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.Get_rank() - 1, world_size=LEARNERS
        )


def leave_gloo(comm: MPI.Intracomm) -> None:
    if comm.Get_rank() in (1, 2):
        torch.distributed.destroy_process_group()
