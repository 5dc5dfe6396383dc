"""Serial computation of the run's gradients, sums and steps, in logged order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.draws import kept
from mpisgd.base.errors import DataError
from mpisgd.data import DataSet
from mpisgd.exchange import deltas
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import team_loss
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import Tensors, turn_of
from mpisgd.records.checkpoint.recut import cut
from mpisgd.replay.checks.order import Compute, Take, Update
from mpisgd.replay.checks.record import Record, Row
from mpisgd.rules.portions import NO_PORTION
from mpisgd.rules.verdict import Kind, Reason
from mpisgd.update.slice_update import SliceUpdate, Step, agree
from mpisgd.vectors import buckets
from mpisgd.vectors.computing import Keeps, Travels
from mpisgd.vectors.kept_state import Turns
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import Runs, common, within

_NOT_LOOKED_AT = (Reason.FINISHED, Reason.REPEATED, Reason.MISSED, Reason.TORN)
"""Reasons of drops before any check for finite values."""


@dataclass
class _Gradient:
    """A gradient, (parameters,) float32, not yet taken by all shards."""

    vector: Tensor
    loss: float
    skipped: Runs
    to_take: int


class _InTurn(Travels):
    """Gradient of a learner, or a team's sum, computed by one process."""

    def __init__(self, ranks: Mapping[int, Travels], drop_nonfinite: bool) -> None:
        self._ranks = ranks
        self._drop_nonfinite = drop_nonfinite
        (first, *others) = ranks.values()
        self.scaled = first.scaled
        self.memory = Memory(first.memory.weights, np.empty_like(first.memory.gradients)) if others else first.memory
        self.samples = 0

    def compute(self, seq: int) -> float:
        summed, losses, self.samples = self.memory.gradients, [], 0
        for gradient in self._ranks.values():
            losses.append(gradient.compute(seq))
            self.samples += gradient.samples
            self.skipped = common(self.skipped, gradient.skipped) if len(losses) > 1 else gradient.skipped
            if len(losses) > 1:
                np.add(summed, gradient.memory.gradients, out=summed)
            elif self.memory is not gradient.memory:
                summed[:] = gradient.memory.gradients
        return team_loss(losses, summed if self._drop_nonfinite else None)


class Serial:
    """All learners and all shards in turn, on the CPU.

    `begun`: states (`SliceUpdate.state`) of slices `begun_bounds`. `model` holds the weights of the last computed gradient.
    Raises ConfigError, DataError: parts cannot be made, or have other sizes.
    """

    def __init__(
        self,
        record: Record,
        user_objects: UserObjects,
        data: DataSet,
        begun: Sequence[Mapping[str, np.ndarray]] = (),
        begun_bounds: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        config = record.config
        self.record = record
        self.config = config
        self.tensors = Tensors.load(config, user_objects, data, record.ranks, record.rules)
        self.model = self.tensors.model
        self.tensors.turns = Turns(self.model.module)
        _check_size(record, self.model.size)
        self.bounds = parts.bounds(config, self.model, record.rules)
        if begun_bounds not in (None, self.bounds):
            begun = [cut(begun, begun_bounds or (), wanted) for wanted in self.bounds]
        self.initial = self.model.weights.clone()
        protocol = record.protocol()
        self.shards = [self.tensors.update(bounds, record.gradients_per_update) for bounds in self.bounds]
        self.nonfinite: list[list[tuple[int, int, float]]] = [[] for _ in self.shards]
        """Clock, learner and loss, by shard."""
        self._gradients = [self._chain(ranks) for ranks in record.members]
        self._format = PushFormat.of(config)
        self._moves_weights = stages.moves_weights(config)
        self._pushes_per_pull = protocol.pushes_per_pull
        self._deltas = [deltas.of_run(config, protocol, update.weights) for update in self.shards]
        self._keeper = Keeps()
        self._snapshots_at: Callable[[int], int] = lambda _: 0
        self._agreed = 0
        """Clock of the shards' last agreed norm."""
        self._own_weights: dict[int, Tensor] = {}
        self._uses = [np.bincount(log.pushes["timestamp"], minlength=1).tolist() for log in record.shards]
        self._slices: list[dict[int, Tensor]] = [{} for _ in self.shards]
        self._under_way: dict[tuple[int, int], _Gradient] = {}
        self._loaded = [-1 for _ in self.shards]
        for shard, log in enumerate(record.shards):
            if log.start.clock:
                update = self.shards[shard]
                update.restore({name: torch.from_numpy(array) for name, array in begun[shard].items()}, log.start.samples)
            if (held := self._deltas[shard]) is not None:
                held.begin(self.shards[shard].weights)
            self._keep(shard, log.start.clock)

    def compute(self, action: Compute) -> tuple[float, int, list[float]]:
        """Compute a gradient; return loss, samples, and rounded-off share per shard."""
        learner_id, number = action
        shards = range(len(self.shards))
        seq = int(self.record.shards[0].pushes["seq"][self.record.shards[0].rows_of[learner_id][number]])
        pulled = number == 0 or seq % self._pushes_per_pull == 0
        timestamps = [int(log.pushes["timestamp"][log.rows_of[learner_id][number]]) for log in self.record.shards]
        for shard in shards:
            self._load(learner_id, shard, timestamps[shard], pulled)
        if not pulled:
            self.model.weights.copy_(self._own_weights[learner_id])
        first = self.record.shards[0]
        portion = first.row(int(first.rows_of[learner_id][number])).portion
        if portion != NO_PORTION:
            self.tensors.sampling.deal(learner_id, portion)
        if learner_id == 0 and pulled:
            self._keeper.begins(self._snapshots_at(timestamps[0]), timestamps[0])
        gradient = self._gradients[learner_id]
        gradient.at_clock(min(timestamps))
        loss = gradient.compute(seq)
        pushed, vector = gradient.memory.tensors[1], torch.empty(self.model.size)
        for (start, end), (at, to) in zip(self.bounds, gradient.memory.cuts or self.bounds, strict=True):
            self._format.widen(pushed[at:to], vector[start:end])
        if (seq + 1) % self._pushes_per_pull:
            gradient.take_own_step()
            self._own_weights[learner_id] = self.model.weights.clone()
        if self._moves_weights:
            self._loaded = [-1 for _ in shards]  # the stages moved the model's weights
        self._under_way[learner_id, number] = _Gradient(vector, loss, gradient.skipped, to_take=len(shards))
        return loss, gradient.samples, [gradient.rounded_of(shard) for shard in shards]

    def scale_of(self, learner_id: int) -> float:
        """Return the loss's factor in the last backward pass."""
        return self._gradients[learner_id].scaled.by

    def take(self, action: Take, row: Row) -> float:
        """Sum a slice with the logged verdict and weight; return the loss."""
        key = (action.learner_id, action.number)
        gradient, update, looks = self._under_way[key], self.shards[action.shard], self.config.nonfinite != "stop"
        if row.verdict == Kind.APPLY or (looks and row.reason not in _NOT_LOOKED_AT):
            start, end = self.bounds[action.shard]
            update.scratch[:] = gradient.vector[start:end].numpy()
            # As the shard did: its log has the norm found on the way.
            if (update.cached or looks) and not (update.scratch_is_finite() and math.isfinite(gradient.loss)):
                self.nonfinite[action.shard].append((row.clock, row.learner_id, gradient.loss))
        if row.verdict == Kind.APPLY:
            skipped = within(gradient.skipped, *self.bounds[action.shard])
            update.accumulate(row.weight, row.samples, row.timestamp, row.gradients, skipped=skipped)
        gradient.to_take -= 1
        if not gradient.to_take:
            del self._under_way[key]
        return gradient.loss

    def update(self, action: Update) -> Step:
        if self.config.agrees and action.clock > self._agreed:
            agree(self.shards)
            self._agreed = action.clock
        step = self.shards[action.shard].step()
        if (held := self._deltas[action.shard]) is not None:
            held.follow(self.shards[action.shard].weights)
        self._keep(action.shard, action.clock)
        return step

    def weights(self, averaged: bool = False) -> Tensor:
        """Copy all slices, (parameters,) float32."""
        return torch.cat([_of(update, averaged) for update in self.shards])

    def _chain(self, ranks: Sequence[int]) -> Travels:
        """Return a learner's gradient with all stages."""
        own = {rank: stages.accumulated(self.config, self.tensors.gradient(rank)) for rank in ranks}
        in_turn = _InTurn(own, self.config.nonfinite == "drop")
        samples, gradients = self.tensors.meta.train_samples, self.record.gradients_per_update
        cut = self.tensors.stages
        nbytes = buckets.OLDER_NBYTES if self.record.rules < 4 else None
        cut_to = stages.buckets_of(self.config, self.model.layers, self.bounds, nbytes)
        pieces = [(bucket.start, bucket.end) for bucket in cut_to] if cut is None else cut.bounds
        segments, fused = self.tensors.segments, self.record.rules < 6
        return stages.chain(self.config, in_turn, self.bounds, samples, gradients, segments, pieces, fused=fused)

    def keep(self, keeper: Keeps, snapshots_at: Callable[[int], int]) -> None:
        """Let `keeper` keep learner 0's state."""
        self._keeper, self._snapshots_at = keeper, snapshots_at

    def end(self) -> None:
        self._keeper.end(0, 0, interrupted=False)

    def turn_of(self, number: int) -> Callable[[], None]:
        return turn_of(self.tensors, number)

    @property
    def first_rank(self) -> int:
        return self.record.members[0][0]

    def _keep(self, shard: int, clock: int) -> None:
        uses, weights, held = self._uses[shard], self.shards[shard].weights, self._deltas[shard]
        if clock < len(uses) and uses[clock]:
            self._slices[shard][clock] = (weights if held is None else held.kept(weights)).clone()

    def _load(self, learner_id: int, shard: int, clock: int, pulled: bool) -> None:
        """Put a pulled slice into the model; forget it after its last use."""
        start, end = self.bounds[shard]
        compensation = self.shards[shard].compensation
        if pulled and compensation is not None:
            compensation.given(learner_id, clock, self._slices[shard][clock])
        held = self._deltas[shard]
        if pulled and held is not None:
            self.model.weights[start:end].copy_(held.given(learner_id, self._slices[shard][clock]))
        elif pulled and self._loaded[shard] != clock:
            self.model.weights[start:end].copy_(self._slices[shard][clock])
            self._loaded[shard] = clock
        self._uses[shard][clock] -= 1
        if not self._uses[shard][clock]:
            del self._slices[shard][clock]


def _of(update: SliceUpdate, averaged: bool) -> Tensor:
    if not averaged:
        return update.weights
    assert update.averaged is not None
    return update.averaged


def load_data(record: Record, user_objects: UserObjects) -> DataSet:
    """Return the data. Raises ConfigError; DataError: also for another number of samples."""
    data = parts.load_data(record.config, user_objects)
    recorded = record.environment("train_samples")
    if len(data.train) != recorded:
        raise DataError(f"the data have {len(data.train)} training samples, the data of {record.path} had {recorded}")
    return data


def _check_size(record: Record, size: int) -> None:
    recorded = record.environment("parameters")
    if size != recorded:
        raise DataError(
            f"the model has {size} parameters, the model of {record.path} had {recorded}: another model, or changed since"
        )


@contextmanager
def as_in_the_run(threads: int) -> Iterator[None]:
    """Use this number of torch threads (last bits depend on it); finally restore torch and generators."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with kept():
            yield
    finally:
        torch.set_num_threads(before)
