"""`bench wire`: the push+pull cycle, with the update, against the floor for the same bytes.

The cycle is what a run does: channel, protocol, finite check, torch.optim, with one learner and one shard. Two floors:

- *stream*: a raw blocking Send of the gradient and Recv of the weights, plus the least memory traffic of the update at the
  machine's measured bandwidth. SGD with momentum reads weights, gradient and momentum and writes weights and momentum: five
  passes over the bytes. Nothing is computed between the messages, so the same bytes are sent again and again.
- *in place*: the same raw messages with five plain passes over the same bytes between them, on the shard, and a new gradient
  each time. It pays what every update must pay and the first floor does not: bytes that another core has just written or read
  are dear to read or write. For slices that fit into a cache this is most of the difference.

Everything is interleaved; the median over cycles of each repetition counts, and ratios are taken within a repetition.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from mpisgd import protocols
from mpisgd.bench.machine import spread
from mpisgd.channel import LearnerChannel, ShardChannel
from mpisgd.config import SgdOptions, SoftsyncOptions
from mpisgd.flat import host_vector, host_view, slice_bounds
from mpisgd.messages import Ending
from mpisgd.mpi import MPI
from mpisgd.records.progress import Progress
from mpisgd.records.snapshots import Nowhere
from mpisgd.records.writer import ShardLog, TableFile
from mpisgd.roles import Roles
from mpisgd.shard import Shard
from mpisgd.update import SliceUpdate
from mpisgd.wire import Wire
from mpisgd.world import look_around

SIZES = (350_000, 4_000_000, 44_000_000, 289_000_000)
"""Bytes of a slice: the CIFAR-10 network, a small one, an 11 M parameter MLP, AlexNet [Zhang16 4.1]."""

UPDATE_PASSES = 5
_WARM_UP = 3


@dataclass(frozen=True)
class Cost:
    """Median seconds of one repetition."""

    raw_s: float
    update_s: float
    in_place_s: float
    cycle_s: float

    @property
    def over_stream(self) -> float:
        return self.cycle_s / (self.raw_s + self.update_s)

    @property
    def over_in_place(self) -> float:
        return self.cycle_s / self.in_place_s


def cycles_for(nbytes: int) -> int:
    """How many cycles make a repetition: many of small ones, few of large ones."""
    return max(5, min(400, 400_000_000 // nbytes))


def measure(comm: MPI.Intracomm, sizes: tuple[int, ...] = SIZES, repetitions: int = 5) -> list[dict[str, Any]]:
    """Measure every size on the first two ranks of `comm`; rank 0 returns the rows, other ranks nothing of worth."""
    rows = []
    world = look_around(comm)
    for nbytes in sizes:
        costs = [_repetition(comm, nbytes, world.oversubscribed) for _ in range(repetitions)]
        rows.append(
            {
                "nbytes": nbytes,
                "cycles": cycles_for(nbytes),
                **{
                    name: spread([getattr(cost, name) for cost in costs])
                    for name in ("raw_s", "update_s", "in_place_s", "cycle_s", "over_stream", "over_in_place")
                },
            }
        )
    return rows


def _repetition(comm: MPI.Intracomm, nbytes: int, polite: bool) -> Cost:
    size, cycles = nbytes // 4, cycles_for(nbytes)
    torch.set_num_threads(1)
    raw_s = _raw(comm, size, cycles, update=False)
    in_place_s = _raw(comm, size, cycles, update=True)
    bandwidth = _bandwidth(size) if comm.Get_rank() == 0 else 1.0
    comm.Barrier()
    values = np.array([raw_s, in_place_s, _cycle(comm, size, cycles, polite)])
    comm.Bcast(values, root=1)
    return Cost(float(values[0]), UPDATE_PASSES * nbytes / bandwidth, float(values[1]), float(values[2]))


def _raw(comm: MPI.Intracomm, size: int, cycles: int, *, update: bool) -> float:
    """Median seconds of a blocking exchange: rank 1 sends `size` floats and receives as many.

    `update`: rank 1 writes a new gradient first (untimed), rank 0 makes five passes over its bytes before it answers.
    """
    gradient, weights, momentum = (host_vector(size) for _ in range(3))
    sent, received = host_view(gradient), host_view(weights)
    comm.Barrier()
    seconds = []
    for cycle in range(cycles + _WARM_UP):
        if update and comm.Get_rank() == 1:
            gradient.fill_(cycle * 1e-6)
        start_s = time.perf_counter()
        if comm.Get_rank() == 1:
            comm.Send(sent, 0)
            comm.Recv(received, 0)
        elif comm.Get_rank() == 0:
            comm.Recv(sent, 1)
            if update:
                momentum.add_(gradient)
                weights.copy_(momentum)
            comm.Send(received, 1)
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[_WARM_UP:])


def _bandwidth(size: int) -> float:
    """Bytes per second that one core moves in the best simple kernel over arrays of this size: copy, or scale-and-add."""
    a, b = torch.ones(size), torch.ones(size)
    best = 0.0
    for kernel, passes in ((lambda: a.copy_(b), 2), (lambda: a.add_(b, alpha=1.0), 3)):
        for _ in range(2 + max(3, 40_000_000 // size)):
            start_s = time.perf_counter()
            kernel()  # type: ignore[no-untyped-call]
            best = max(best, passes * 4 * size / (time.perf_counter() - start_s))
    return best


def _cycle(comm: MPI.Intracomm, size: int, cycles: int, polite: bool) -> float:
    """Median seconds of push + update + pull, seen by the learner."""
    roles = Roles(shard_ranks=(0,), learner_ranks=(1,), evaluator_rank=1)
    wire = Wire(comm, polite=polite)
    protocol = protocols.make(SoftsyncOptions(n=1), 1)
    if comm.Get_rank() == 0:
        update = SliceUpdate(host_vector(size), SgdOptions(), learning_rate=0.1, schedule=lambda _: 1.0, train_samples=1)
        server = Shard(
            ShardChannel(wire, roles, 0),
            protocol,
            update,
            lambda_=1,
            budget_samples=cycles + _WARM_UP,
            nonfinite="stop",
            snapshots=Nowhere(),
            log=ShardLog(TableFile(None, shard=0, flush_rows=256, flush_s=2.0), 0),
            progress=Progress("off", 1.0, 1.0),
        )
        server.evaluating = False
        server.serve()
        return 0.0
    if comm.Get_rank() > 1:
        return 0.0
    gradients = np.zeros(size, np.float32)
    channel = LearnerChannel(
        wire,
        roles,
        0,
        weights=np.zeros(size, np.float32),
        gradients=gradients,
        bounds=slice_bounds(size, 1),
        consistent=False,
    )
    answers = channel.pull(0)
    seconds, seq = [], 0
    while not answers.stop:
        gradients.fill(seq * 1e-6)
        start_s = time.perf_counter()
        channel.push(seq=seq, samples=1, loss=0.0, compute_ns=0, delay_ns=0, last=answers, push_ns=0)
        answers = channel.pull(0)
        seconds.append(time.perf_counter() - start_s)
        seq += 1
    channel.goodbye(ending=Ending.FINISHED)
    return median(seconds[_WARM_UP:-1])
