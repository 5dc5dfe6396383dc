"""Worlds of a run made again: learners fare as logged, and attempts meet at a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.comm.virtual.scripted import EagerWire
from mpisgd.comm.virtual.wire import Signal
from mpisgd.config import Config, replace
from mpisgd.data import DataSet
from mpisgd.exchange.ways import GATHERED, IN_MEMORY
from mpisgd.gradient import stages
from mpisgd.job.roles import RankRole
from mpisgd.job.tensors import Tensors
from mpisgd.job.world import Setup
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.record import Record
from mpisgd.replay.rerun.evaluations import EvaluatorByLog, Told
from mpisgd.replay.rerun.fates import ByLog, DealtByLog, costs_of, parts
from mpisgd.replay.rerun.results import check_sizes
from mpisgd.replay.rerun.script import ShardScript
from mpisgd.rules.portions import Portions
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.world import SizedWorld, TensorWorld, VirtualWorld, gpu_of
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.memory import Memory, on_host


def computes_late(config: Config) -> bool:
    """Return whether learners compute when their push is wanted, in common memory: each push follows a pull of all weights."""
    alone = not (config.protocol.collective or config.in_teams or config.in_groups)
    whole = config.plain and config.way == "whole" and config.pull_format == "float32" and not stages.moves_weights(config)
    return alone and whole and config.virtual.gradients


class Stopped(Exception):
    """All shards have come to the clock at which a rerun stops."""


class LogWorld(VirtualWorld):
    """World of a rerun: learners fare as logged.

    Attributes:
        eager: wires of ranks without a script.
    """

    def __init__(self, record: Record, *arguments: Any) -> None:
        self.record = record
        self.scripts: dict[int, ShardScript] = {}
        self.eager: dict[int, EagerWire] = {}
        super().__init__(*arguments)

    @property
    def rules(self) -> int:
        return self.record.rules

    @property
    def late(self) -> bool:
        """Learners compute late."""
        return computes_late(self.config)

    def _cut(self, bounds: list[tuple[int, int]]) -> None:
        """Let vectors travel in turn, with the same bits: learners may compute late."""
        super()._cut(bounds)
        if self.config.way in (*IN_MEMORY, GATHERED):
            self.config = replace(self.config, way="whole")

    def portions_of(self, rank: int, portions: Portions | None) -> Portions | None:
        if portions is None or not portions.deals:
            return portions
        return DealtByLog(portions, self.record, self.scripts[rank])

    def presence_of(self, rank: int) -> Callable[..., FaultTolerant]:
        return functools.partial(ByLog, self.scripts[rank])

    def part_with(self, role: RankRole, failure: LearnerFailed) -> None:
        """Let a learner leave that said goodbye. Raises LearnerFailed for others."""
        if not parts(self.record, failure.learner_id):
            raise failure
        super().part_with(role, failure)

    def _next_ns(self, rank: int) -> Callable[[], int]:
        wire, costs = self.eager[rank], costs_of(self.record, self.roles.index(rank), functools.partial(self._signal, rank))

        def cost() -> int:
            wire.await_turn()
            return next(costs)

        return cost

    def _signal(self, rank: int) -> None:
        """End all ranks after the round in which the log has a signal."""
        if self.config.protocol.collective:
            events = self.record.shards[self.roles.index(rank)].events
            for number in events["value"][(events["kind"] == Event.INTERRUPTED) & (events["value"] > 0)].tolist():
                Signal(self.wires[rank], int(number), takes=False).happen(0)


class _AtSeam(Checkpoints):
    """Checkpoints at one clock, and after a signal; `taken`: called after each."""

    def __init__(self, seam: int, taken: Callable[[], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seam = seam
        self._taken = taken

    def lasts(self, clock: int) -> bool:
        return clock == self._seam

    def busy(self) -> bool:
        self.wait()
        return False

    def take(self, rows: list[int], *, last: bool = False, **told: Any) -> None:
        super().take(rows, last=last, **told)
        self._taken()


class SizedLogWorld(LogWorld, SizedWorld):
    """World of sizes."""


class TensorLogWorld(LogWorld, TensorWorld):
    """World of tensors, with checkpoints where attempts meet.

    Attributes:
        initial: weights, (parameters,) float32.
        made: checkpoints, by shard.
    """

    setup: Setup

    def __init__(self, *arguments: Any, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        super().__init__(*arguments)

    def _shard_device(self) -> str:
        return gpu_of("shard_device") if self._on_gpu and self.record.config.shard_device == "cuda" else "cpu"

    def _updates_as_real(self) -> bool:
        return self.tensors.shard_device != "cpu" and not self.record.run.environment.get("virtual", False)

    def _at_once(self, data: DataSet) -> None:
        """Compute gradients one by one."""

    def _memory(self, rank: int) -> Memory:
        return self.tensors.model.memory if self.late else super()._memory(rank)

    def _check(self, tensors: Tensors) -> None:
        check_sizes(self.record, self.meta.train_samples, self.parameters)
        super()._check(tensors)

    @property
    def there(self) -> bool:
        """True = the rerun stops where it begins."""
        return len(self._begun) == self.config.shards

    def goes_on(self, setup: Setup, told: Told, seam: int, *, stops: bool) -> None:
        self.setup, self._seam, self._stops, self.saves = setup, seam, stops, seam >= 0
        self.tensors.evaluator = functools.partial(EvaluatorByLog, told=told)
        self.initial = self.tensors.model.weights.cpu().clone()
        self.made: dict[int, Checkpoints] = {}
        self._updates: dict[int, SliceUpdate] = {}
        self._begun: dict[int, Tensor] = {}
        self._there = set[int]()

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        update, shard = super().update(rank, gradients_per_update), self.roles.index(rank)
        if (before := self.setup.account(shard)) is not None:
            update.restore(self.saved(rank), before.samples)
        if self._stops and self._seam == self.record.start_clock:
            self._begun[shard] = update.weights.cpu().clone()
        self._updates[shard] = update
        return update

    def slice_at_seam(self, shard: int) -> np.ndarray:
        """Return a shard's weights, (slice,) float32, where the rerun stopped."""
        directory = disk.directory_of(self.setup.path, self._seam)
        if shard in self._begun:
            return self._begun[shard].numpy()
        if shard in self._there:
            return disk.read_part(directory, shard).tensors(directory / disk.part_file(shard))["weights"]
        return on_host(self._updates[shard].weights)  # after the last update

    def _arrive(self, shard: int) -> None:
        """Note a shard at the seam. Raises Stopped: all shards are there, and the rerun stops."""
        self._there.add(shard)
        if self._stops and len(self._there) == self.config.shards:
            raise Stopped

    def saved(self, rank: int) -> dict[str, Tensor]:
        assert self.setup.resumption is not None
        saved = self.setup.resumption.checkpoint.tensors(self.roles.index(rank))
        return {name: torch.from_numpy(array) for name, array in saved.items()}

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints | None:
        if not self.saves:
            return None
        setup, shard, model = self.setup, self.roles.index(rank), self.tensors.model
        share = Share(
            setup.path,
            shard,
            bounds=setup.bounds[shard],
            shards=self.config.shards,
            learners=self.roles.lambda_,
            model=model.fingerprint,
            attempt=setup.attempt,
            continues=rows,
        )
        self.made[shard] = _AtSeam(self._seam, functools.partial(self._arrive, shard), share, self.config.checkpoint, update)
        return self.made[shard]
