"""`bench train`: images/s of hardsync against PyTorch DDP and against loops that do not communicate.

One shard and two learners train on synthetic data; beside them, in the same job and interleaved, two of the same ranks run
DDP over gloo, and two loops with no communication at all: the compute floor. The same model, memory format, mini-batches,
optimiser (SGD with momentum) and one thread each. DDP is tried with and without gradients as views of its buckets, and the
better one counts.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpisgd import models
from mpisgd.bench.cases import CASES, DATA, LEARNERS, SAMPLES, SEED, WARM_UP, Case, config_of
from mpisgd.bench.machine import spread
from mpisgd.config import LogOptions
from mpisgd.data import load, sampling
from mpisgd.finish import Outcome
from mpisgd.flat import FlatModel
from mpisgd.gradient import Gradient
from mpisgd.mpi import MPI
from mpisgd.records.reader import Run
from mpisgd.run import run
from mpisgd.wire import Wire


def measure(comm: MPI.Intracomm, repetitions: int = 4) -> list[dict[str, Any]]:
    """Every case on the three ranks of `comm`; the rows are the same on every rank."""
    wire = Wire(comm, polite=True)
    _join_gloo(comm)
    with scratch(comm) as directory:
        rows = [_row(comm, wire, directory, case, repetitions) for case in CASES]
    if comm.Get_rank() in (1, 2):
        torch.distributed.destroy_process_group()
    return rows


def _row(comm: MPI.Intracomm, wire: Wire, directory: Path, case: Case, repetitions: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "loops": lambda: _loops(comm, wire, case),
        "ddp": lambda: _ddp(comm, wire, case, views=False),
        "ddp_views": lambda: _ddp(comm, wire, case, views=True),
        "hardsync": lambda: _hardsync(comm, directory, case),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            rates[name].append(way())
    best_ddp = [max(pair) for pair in zip(rates["ddp"], rates["ddp_views"], strict=True)]
    return {
        "case": case.name,
        "images_per_s": {name: spread(values) for name, values in rates.items()},
        "hardsync_over_ddp": spread([h / d for h, d in zip(rates["hardsync"], best_ddp, strict=True)]),
        "hardsync_over_loops": spread([h / f for h, f in zip(rates["hardsync"], rates["loops"], strict=True)]),
    }


def measure_log(comm: MPI.Intracomm, repetitions: int = 6) -> list[dict[str, Any]]:
    """Throughput of hardsync with the run log over without, interleaved."""
    rows = []
    with scratch(comm) as directory:
        for case in CASES:
            on, off = [], []
            for _ in range(repetitions):
                off.append(_whole_run(comm, directory, case, log=False))
                on.append(_whole_run(comm, directory, case, log=True))
            rows.append(
                {
                    "case": case.name,
                    "images_per_s": {"on": spread(on), "off": spread(off)},
                    "on_over_off": spread([a / b for a, b in zip(on, off, strict=True)]),
                }
            )
    return rows


@contextmanager
def scratch(comm: MPI.Intracomm) -> Iterator[Path]:
    """A directory for run logs that all ranks see, gone afterwards."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(comm.bcast(own, root=0))
        comm.Barrier()


def _hardsync(comm: MPI.Intracomm, directory: Path, case: Case) -> float:
    """Images/s of a logged run, from update WARM_UP to the last one."""
    outcome = run_of(comm, directory, case)
    updated_s = comm.bcast(Run(outcome.path).updates["time_s"] if comm.Get_rank() == 0 else None)
    return float(LEARNERS * case.updates * case.mu / (updated_s[-1] - updated_s[WARM_UP - 1]))


def _whole_run(comm: MPI.Intracomm, directory: Path, case: Case, *, log: bool) -> float:
    """Images/s from the start barrier to the last update: what a run without a log can tell."""
    outcome = run_of(comm, directory, case, log=LogOptions(enabled=log, progress="off"))
    return outcome.samples[0] / outcome.training_s


def run_of(comm: MPI.Intracomm, directory: Path, case: Case, **special: Any) -> Outcome:
    """A run of hardsync; `special`: fields of its configuration that are others than usual."""
    return run(config_of(directory, case, **special), comm)


def _gradient(case: Case, learner_id: int) -> tuple[FlatModel, Gradient]:
    data = load(DATA, seed=SEED)
    module = models.make(case.model, input_shape=data.input_shape, classes=data.classes, seed=SEED)
    flat = FlatModel(module, "channels_last")
    dealt = sampling.make("epoch", size=SAMPLES, mu=case.mu, lambda_=LEARNERS, seed=SEED)
    return flat, Gradient(flat, nn.functional.cross_entropy, data.train, dealt, seed=SEED, learner_id=learner_id)


def _timed(comm: MPI.Intracomm, wire: Wire, case: Case, make: Callable[[int], Callable[[int], object]]) -> float:
    """Images/s of `updates` mini-batches on each of ranks 1 and 2; rank 0 waits without using a core."""
    torch.set_num_threads(1)
    learner_id = comm.Get_rank() - 1
    step = make(learner_id) if 0 <= learner_id < LEARNERS else None
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
    return LEARNERS * case.updates * case.mu / float(slowest[0])


def _loops(comm: MPI.Intracomm, wire: Wire, case: Case) -> float:
    """Each learner on its own: gradient and update, nothing sent."""

    def make(learner_id: int) -> Callable[[int], object]:
        flat, gradient = _gradient(case, learner_id)
        weights = nn.Parameter(flat.weights)
        weights.grad = flat.gradients
        optimizer = torch.optim.SGD([weights], lr=0.001, momentum=0.9, fused=True)

        def step(seq: int) -> None:
            gradient.compute(seq)
            optimizer.step()

        return step

    return _timed(comm, wire, case, make)


def _ddp(comm: MPI.Intracomm, wire: Wire, case: Case, *, views: bool) -> float:
    """DistributedDataParallel over gloo."""

    def make(learner_id: int) -> Callable[[int], object]:
        data = load(DATA, seed=SEED)
        module = models.make(case.model, input_shape=data.input_shape, classes=data.classes, seed=SEED)
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001, momentum=0.9, fused=True)
        dealt = sampling.make("epoch", size=SAMPLES, mu=case.mu, lambda_=LEARNERS, seed=SEED)

        def step(seq: int) -> None:
            inputs, targets = data.train.batch(dealt.indices(learner_id, seq))
            optimizer.zero_grad(set_to_none=not views)
            loss = nn.functional.cross_entropy(parallel(inputs.contiguous(memory_format=torch.channels_last)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            loss.item()
            optimizer.step()

        return step

    return _timed(comm, wire, case, make)


def _join_gloo(comm: MPI.Intracomm) -> None:
    """Ranks 1 and 2 form a process group of torch.distributed on this host."""
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
