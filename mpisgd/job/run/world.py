"""The real world: ranks of MPI's, on which all things take their own time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mpisgd.comm.mpi.library import MPI, takes_gpu_memory
from mpisgd.comm.mpi.tolerant import TolerantWire
from mpisgd.comm.mpi.wire import Wire
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Role
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.layerwise_gradient import LayerwiseGradient
from mpisgd.job import parts
from mpisgd.job.building.world import FailFast, Tolerant, World
from mpisgd.job.run.start import Start
from mpisgd.liveness.pulse import Pulse
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.update.slice_update import SliceUpdate


class MpiWorld(World):
    """The world of this very rank, which is the only one that it is asked about."""

    def __init__(self, start: Start, wire: Wire) -> None:
        config = start.setup.config
        self.tolerance = Tolerant(config.faults.patience_s, start.ranks.hosts) if start.tolerant else FailFast()
        self.closing = ExitStack()
        self.shows_progress = self.saves = True
        self._start = start
        self._tensors = start.tensors
        self._config = config
        self._role = start.setup.roles.of(start.rank)
        self._wire = wire
        on_gpu = "cuda" in (config.device, config.shard_device)
        self._direct = on_gpu and takes_gpu_memory() and not start.tolerant
        """Whether MPI is given a GPU's memory. Not where ranks may be lost: a transfer that is given up keeps its memory."""

    def wire(self, rank: int) -> Wire:
        return self._wire

    def gradient(self, rank: int) -> Gradient:
        direct = self._direct and self._role is Role.LEARNER and parts.pushes_what_it_computes(self._config)
        return self._tensors.gradient(self._start.setup.roles.number(rank), direct=direct)

    def by_layers(self, rank: int, gradient: Any, channel: Any) -> LayerwiseGradient:
        return LayerwiseGradient(gradient, self._tensors.model, self._start.setup.bounds, channel)

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        """A rank that is nothing but a shard has no further use for the model."""
        bounds, alone = self._start.setup.bounds[self._start.setup.roles.index(rank)], self._role is Role.SHARD
        update = self._tensors.update(bounds, gradients_per_update, direct=self._direct and alone)
        if alone:
            del self._tensors.model
        return update

    def snapshots(self, path: Path, update: Any, resumed: Sequence[Sequence[float]]) -> Snapshots:
        return self._tensors.snapshots(path, update, resumed)

    def evaluate(self, channel: Callable[..., EvaluatorChannel], log: EvaluatorLog, weights_file: Path, first: int) -> None:
        tensors = self._tensors
        assert tensors.data is not None
        told = parts.make_told(self._config, tensors.data)
        tensors.evaluate(channel, log, weights_file, first, measure=tensors.measure(), told=told)

    def warn(self, rank: int, text: str) -> None:
        """Said by any rank, and even where progress is off."""
        who = f"rank {rank} ({self._start.setup.roles.describe(rank)}) on {self._start.ranks.hosts[rank]}"
        print(f"mpisgd: {who}: {text}", file=sys.stderr, flush=True)


def make_wire(comm: MPI.Intracomm, start: Start, pulse: Pulse) -> Wire:
    """This rank's end of the wire; where learners may die, `pulse` heeds the shards of it."""
    ranks, roles = start.ranks, start.setup.roles
    if not start.tolerant:
        return Wire(comm, polite=ranks.oversubscribed, ranks_per_core=ranks.ranks_per_core)
    wire = TolerantWire(
        comm,
        polite=ranks.oversubscribed,
        vital=roles.shard_ranks,
        describe=roles.describe,
        patience_s=start.setup.config.faults.patience_s,
    )
    pulse.heed_shards(roles.shard_ranks, wire)
    return wire
