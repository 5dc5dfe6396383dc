"""`bench wire`: the push+pull cycle, with the update, against the floor for the same bytes.

The cycle is a run's: channel, protocol, finite check, torch.optim. Two floors:

- *stream*: raw blocking Send of the gradient and Recv of the weights, plus the update's least memory traffic at measured bandwidth.
  The bytes never change.
- *in place*: the same messages, with as many plain passes on the shard between them, and a new gradient each time.

A repetition's median cycle counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.bench.parts.runs import among
from mpisgd.comm.messages import Ending
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire
from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    LambOptions,
    LarsOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
)
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.liveness.ranks import look_around
from mpisgd.protocols import SoftsyncOptions
from mpisgd.records.checkpoint.snapshots import Nowhere
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import slice_bounds
from mpisgd.vectors.memory import host_vector, host_view

OPTIMIZERS: dict[str, tuple[OptimizerOptions, int]] = {
    "sgd": (SgdOptions(), 5),
    "adagrad": (AdagradOptions(), 5),
    "rmsprop": (RmspropOptions(momentum=0.9), 7),
    "adam": (AdamOptions(), 7),
    "adamw": (AdamwOptions(), 7),
    "lars": (LarsOptions(), 7),
    "lamb": (LambOptions(), 9),
}
"""Options, and least passes over the bytes: weights and state read and written, gradient read.

LARS reads weights and gradient again, for norms; LAMB writes and reads the step.
"""
_WARM_UP = 3


@dataclass(frozen=True)
class Layout:
    """Ranks: shards, then learners."""

    learners: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.shards + self.learners

    def slice_of(self, rank: int, size: int) -> tuple[int, int]:
        return slice_bounds(size, self.shards)[rank]

    def learns(self, rank: int) -> bool:
        return self.shards <= rank < self.ranks


LAYOUTS = (Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2))


@dataclass(frozen=True)
class Cost:
    raw_s: float
    update_s: float
    in_place_s: float
    cycle_s: float


def cycles_for(nbytes: int) -> int:
    return max(5, min(400, 400_000_000 // nbytes))


def measure(comm: MPI.Intracomm, sizes: Sequence[int], repetitions: int, optimizers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure the first optimiser in each layout with enough ranks, the others in the first layout; rows are equal on all ranks."""
    layouts = [layout for layout in LAYOUTS if layout.ranks <= comm.Get_size()]
    points = [(layout, optimizers[0]) for layout in layouts] + [(LAYOUTS[0], name) for name in optimizers[1:]]
    yield from (_row(comm, nbytes, layout, name, repetitions) for layout, name in points for nbytes in sizes)


def _row(comm: MPI.Intracomm, nbytes: int, layout: Layout, optimizer: str, repetitions: int) -> dict[str, Any]:
    costs: list[Cost] = []
    with among(comm, range(layout.ranks)) as part:
        if part is not None:
            polite = look_around(part).oversubscribed
            costs = [_repetition(part, nbytes, layout, optimizer, polite) for _ in range(repetitions)]
    costs = comm.bcast(costs)
    floor_s = [cost.raw_s + cost.update_s for cost in costs]
    cycle_s = [cost.cycle_s for cost in costs]
    return {
        "nbytes": nbytes,
        "learners": layout.learners,
        "shards": layout.shards,
        "optimizer": optimizer,
        "cycles": cycles_for(nbytes),
        **{name: spread([getattr(cost, name) for cost in costs]) for name in ("raw_s", "update_s", "in_place_s", "cycle_s")},
        "over_stream": over(cycle_s, floor_s),
        "over_in_place": over(cycle_s, [cost.in_place_s for cost in costs]),
    }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = f"{'learners':>8} {'shards':>6} {'optimiser':>9} {'bytes':>12} {'raw':>11} {'update':>11} {'in place':>11} {'cycle':>11}"
    lines = [f"{head}   cycle/(raw+update)    cycle/in place"]
    for row in rows:
        ms = " ".join(f"{1e3 * row[key]['median']:8.3f} ms" for key in ("raw_s", "update_s", "in_place_s", "cycle_s"))
        what = f"{row['learners']:8} {row['shards']:6} {row['optimizer']:>9} {row['nbytes']:12,}"
        lines.append(f"{what} {ms}   {show(row['over_stream'])}   {show(row['over_in_place'])}")
    return lines


def _repetition(comm: MPI.Intracomm, nbytes: int, layout: Layout, optimizer: str, polite: bool) -> Cost:
    size, cycles = nbytes // 4, cycles_for(nbytes)
    options, passes = OPTIMIZERS[optimizer]
    torch.set_num_threads(1)
    raw_s = _raw(comm, size, cycles, layout)
    in_place_s = _raw(comm, size, cycles, layout, passes)
    bandwidth = comm.bcast(_bandwidth(size // layout.shards) if comm.Get_rank() == 0 else None)
    cycle_s = _cycle(comm, size, cycles, layout, options, polite)
    # in a learner's cycle, each shard makes an update per learner
    update_s = layout.learners * passes * nbytes / layout.shards / bandwidth
    raw_s, in_place_s, cycle_s = (_of_learners(comm, layout, each) for each in (raw_s, in_place_s, cycle_s))
    return Cost(raw_s, update_s, in_place_s, cycle_s)


def _of_learners(comm: MPI.Intracomm, layout: Layout, own_s: float) -> float:
    total: float = comm.allreduce(own_s if layout.learns(comm.Get_rank()) else 0.0)
    return total / layout.learners


def _raw(comm: MPI.Intracomm, size: int, cycles: int, layout: Layout, passes: int = 0) -> float:
    """Return a learner's median seconds of a blocking exchange with all shards.

    `passes`: the learner writes a new gradient (untimed), and the shard makes this many passes before answering.
    """
    gradient, weights, *state = (host_vector(size) for _ in range(4))
    sent, received = host_view(gradient), host_view(weights)
    rank, seconds = comm.Get_rank(), []
    slices = [slice(*layout.slice_of(shard, size)) for shard in range(layout.shards)]
    comm.Barrier()
    if not layout.learns(rank):
        own, status = slices[rank], MPI.Status()
        for _ in range(layout.learners * (cycles + _WARM_UP)):
            comm.Probe(MPI.ANY_SOURCE, status=status)
            comm.Recv(sent[own], status.Get_source())
            if passes:
                state[0][own].add_(gradient[own])
                weights[own].copy_(state[0][own])
            if passes > 5:
                state[1][own].copy_(gradient[own])
            comm.Send(received[own], status.Get_source())
        return 0.0
    for cycle in range(cycles + _WARM_UP):
        if passes:
            gradient.fill_(cycle * 1e-6)
        start_s = time.perf_counter()
        for shard, own in enumerate(slices):
            comm.Send(sent[own], shard)
        for shard, own in enumerate(slices):
            comm.Recv(received[own], shard)
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[_WARM_UP:])


def _bandwidth(size: int) -> float:
    a, b = torch.ones(size), torch.ones(size)
    best = 0.0
    for kernel, passes in ((lambda: a.copy_(b), 2), (lambda: a.add_(b, alpha=1.0), 3)):
        for _ in range(2 + max(3, 40_000_000 // size)):
            start_s = time.perf_counter()
            kernel()  # type: ignore[no-untyped-call]
            best = max(best, passes * 4 * size / (time.perf_counter() - start_s))
    return best


def _cycle(comm: MPI.Intracomm, size: int, cycles: int, layout: Layout, options: OptimizerOptions, polite: bool) -> float:
    shards, learners = tuple(range(layout.shards)), tuple(range(layout.shards, layout.ranks))
    roles = Roles(shard_ranks=shards, learner_ranks=learners, evaluator_rank=learners[0])
    wire, rank = Wire(comm, polite=polite), comm.Get_rank()
    if rank in shards:
        start, end = layout.slice_of(rank, size)
        update = SliceUpdate(host_vector(end - start), options, learning_rate=0.1, schedule=lambda _: 1.0, train_samples=1)
        protocol = SoftsyncOptions(n=layout.learners).make(layout.learners)
        log = ShardLog(TableFile(None, shard=rank, flush_rows=256, flush_s=2.0), rank)
        server = Shard(
            ShardChannel(wire, roles, rank),
            Rules(protocol, layout.learners, layout.learners * (cycles + _WARM_UP)),
            update,
            ShardRecords(log, Progress("off", 1.0, 1.0), Nowhere()),
            nonfinite="stop",
        )
        server.snapshot_server.is_open = False
        server.serve()
        return 0.0
    gradients = np.zeros(size, np.float32)
    slices = Slices(np.zeros(size, np.float32), gradients, slice_bounds(size, layout.shards))
    channel = LearnerChannel(wire, roles, rank - layout.shards, slices, consistent=False)
    answers = channel.pull(0)
    seconds, seq = [], 0
    while not answers.stop:
        gradients.fill(seq * 1e-6)
        start_s = time.perf_counter()
        channel.push(Report(seq, samples=1, loss=0.0, compute_ns=0, delay_ns=0))
        answers = channel.pull(0)
        seconds.append(time.perf_counter() - start_s)
        seq += 1
    channel.goodbye(ending=Ending.FINISHED)
    return median(seconds[_WARM_UP:-1])
