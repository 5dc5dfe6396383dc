"""Common knowledge of a job's ranks, and their world: MPI's, or virtual (DESIGN 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.communicator import Communicator, Group
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import parts
from mpisgd.job.parts import Meta
from mpisgd.job.resume import Resumption
from mpisgd.job.tensors import Tensors, stage_of
from mpisgd.pipeline.stage import Stage
from mpisgd.protocols import Protocol
from mpisgd.records.callbacks import NO_CALLBACKS, Callbacks
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.log import schema
from mpisgd.rules.portions import Portions
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.update import schedule
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.computing import FREE, Charges, Computes, Travels, Updates
from mpisgd.vectors.cut import Stages


class View(NamedTuple):
    """A rank's view of a job: roles, piece of the flat vector, slices of the piece."""

    roles: Roles
    bounds: list[tuple[int, int]]
    piece: tuple[int, int]


@dataclass(frozen=True)
class Setup:
    """The job as agreed, and its resumption.

    Attributes:
        config: with a named exchange; `asked`: the user's.
        resumption: None = a new run.
        stages: of the model, if learners are groups.
        jointly: learner 0's ranks evaluate together, each its piece: none has the whole model.
    """

    config: Config
    asked: Config
    roles: Roles
    protocol: Protocol
    hosts: Sequence[str]
    meta: Meta
    bounds: list[tuple[int, int]]
    resumption: Resumption | None = None
    stages: Stages | None = None
    jointly: bool = False

    @cached_property
    def path(self) -> Path:
        return Path(self.config.out)

    def seen_by(self, rank: int) -> View:
        """Return a rank's part: of its stage, if the model is cut."""
        stages, roles = self.stages, self.roles
        if stages is None:
            return View(roles, self.bounds, (0, self.bounds[-1][1]))
        stage = stage_of(roles, stages, rank)
        return View(roles.seen_by(stage, stages.shards[stage], jointly=self.jointly), stages.slices_of(stage), stages.bounds[stage])

    @property
    def gradients_per_update(self) -> float:
        return parts.gradients_per_update(self.protocol, self.roles.lambda_, self.roles.streams)

    def check_schedule(self) -> None:
        """Raise ConfigError for an impossible schedule, before anything is sent or written."""
        schedule.of_run(self.config, self.gradients_per_update, self.meta.train_samples)

    @property
    def _samples(self) -> int:
        return parts.run_samples(self.config, self.meta.train_samples)

    @property
    def _pushes(self) -> int:
        return math.ceil(self._samples / (self.config.mini_batches_per_push * self.config.mu))

    def portions(self, shard: int) -> Portions | None:
        """Return a shard's portions; None if learners draw by themselves."""
        dealt = self.config.sampling == "dealt"
        return Portions(self._pushes, self.roles.lambda_, deals=shard == 0) if dealt else None

    def budget_samples(self, shard: int) -> float:
        """Return applied samples at which a shard stops the run; infinite if learners leave alone, or another shard deals."""
        stops = shard == 0 if self.config.sampling == "dealt" else not self.protocol.exact
        return self._samples if stops else math.inf

    def share(self, learner_id: int) -> float:
        """Return pushes after which a learner leaves by itself; infinite if a shard stops the run."""
        alone = self.protocol.exact and self.config.sampling != "dealt"
        return math.ceil((self._pushes - learner_id) / self.roles.lambda_) if alone else math.inf

    @property
    def begins_s(self) -> float:
        return 0.0 if self.resumption is None else self.resumption.checkpoint.now_s

    @property
    def attempt(self) -> int:
        return 0 if self.resumption is None else self.resumption.attempt

    def account(self, shard: int) -> Account | None:
        return None if self.resumption is None else self.resumption.checkpoint.parts[shard].account

    def first_seq(self, learner_id: int) -> int:
        return 0 if self.resumption is None else self.resumption.checkpoint.next_seq[learner_id]

    def spool(self, shard: int) -> Path:
        return self.path / schema.spool_file(shard, 0 if self.resumption is None else self.resumption.layout)


class World(ABC):
    """Communicators, computing, and its cost in virtual seconds; `tensors`: None if only sizes travel."""

    config: Config
    roles: Roles
    tensors: Tensors | None
    may_leave = False
    early = True
    """Gradients may leave during a backward pass."""
    saves = False
    progress: Any = "off"
    callbacks: Callbacks = NO_CALLBACKS

    @abstractmethod
    def wire(self, rank: int) -> Communicator: ...

    @abstractmethod
    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        """Return a rank's gradient, in own or `shared` memory; in a `group`, of its stage."""

    def buckets(self) -> list[Bucket]:
        """Return the parts of gradients in an allreduce; empty = whole."""
        return []

    @abstractmethod
    def by_layers(self, rank: int, computed: Any, pushed: Travels, channel: Any) -> Computes:
        """Return a gradient that tells `channel` of each slice, or bucket; `pushed`: the pushed form of `computed`."""

    @abstractmethod
    def update(self, rank: int, gradients_per_update: float) -> Updates:
        """Return the update of a shard's slice, from initial or saved weights."""

    def group(self, rank: int, ranks: Sequence[int]) -> Group:
        """Return the ranks that are one learner; collective. Waiting raises Broken if any is lost."""
        return self.wire(rank).team(ranks, [(0, 0) for _ in ranks])

    def _staged(self, rank: int, passes: Any, team: Group) -> Stage:
        config, group = self.config, self.roles.groups[self.roles.index(rank)]
        clips, alternating = team if config.clip_norm > 0 else None, config.pipeline == "1f1b"
        return Stage(self.wire(rank), group, passes, config.micro_batches, alternating=alternating, clips=clips)

    def weights(self, bounds: tuple[int, int]) -> Tensor:
        """Return a copy of a slice's weights, (slice,) float32, in host memory; the model may go."""
        assert self.tensors is not None
        return self.tensors.model.weights[slice(*bounds)].to("cpu", copy=True)

    def saved(self, rank: int) -> dict[str, Tensor]:
        """Return a shard's tensors from the checkpoint; once."""
        raise ProtocolError(f"rank {rank}: nothing is saved here")

    def charges(self, rank: int) -> Charges:
        """Return what pays a shard's virtual seconds."""
        return FREE

    def portions_of(self, rank: int, portions: Portions | None) -> Portions | None:
        """Return what deals a shard's portions."""
        return portions

    def presence_of(self, rank: int) -> Callable[..., FaultTolerant]:
        """Return the maker of a fault-tolerant shard's presence."""
        return FaultTolerant

    def shared(self, rank: int, ranks: Sequence[int], words: int, outboxes: int = 0) -> SharedMemory:
        """Return memory of a node's ranks for words, weights and gradients; collective."""
        assert self.tensors is not None
        return SharedMemory.of(self.wire(rank), ranks, words, self.tensors.model.size, outboxes)

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints | None:
        return None

    def sum_cost(self, rank: int, places: int) -> Callable[[], None]:
        """Return a call that lets virtual time pass, before a sum of `places` gradients."""
        return _nothing

    def warn(self, rank: int, text: str) -> None:  # noqa: B027 - a virtual world has no audience
        """Warn people, even with progress off."""


def _nothing() -> None:
    """Do nothing: real things take their own time."""
