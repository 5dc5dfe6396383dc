"""What all ranks of a job know when they are built, and the world that they are built in: MPI's, or a virtual one (DESIGN 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.communicator import Communicator, Group, Node
from mpisgd.config import Config
from mpisgd.exchange.roles import Role, Roles
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import parts
from mpisgd.job.parts import Meta
from mpisgd.job.resume import Resumption
from mpisgd.job.tensors import Tensors
from mpisgd.protocols import Protocol
from mpisgd.records.callbacks import NO_CALLBACKS, Callbacks
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.log import schema
from mpisgd.update import schedule
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.computing import Computes, Travels, Updates
from mpisgd.vectors.cut import Stages


class Seen(NamedTuple):
    """The part of a job that a rank has to do with: the roles, its piece of the flat vector, and the slices of that piece."""

    roles: Roles
    bounds: list[tuple[int, int]]
    piece: tuple[int, int]


@dataclass(frozen=True)
class Setup:
    """What was agreed on, and from where the run goes on.

    Attributes:
        hosts: host name of each rank.
        bounds: the slice of each shard.
        resumption: None where the run begins.
        stages: of the model, where learners are groups of ranks.
        jointly: the ranks of learner 0 evaluate together, each its own piece, for none of them has the whole model.
    """

    config: Config
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
        """The run's directory."""
        return Path(self.config.out)

    def seen_by(self, rank: int) -> Seen:
        """What a shard, or a rank that computes, sees: of its stage, where the model is cut into stages."""
        stages, roles = self.stages, self.roles
        if stages is None:
            return Seen(roles, self.bounds, (0, self.bounds[-1][1]))
        stage = stages.of_shard(roles.index(rank)) if roles.of(rank) is Role.SHARD else roles.stage(rank)
        return Seen(roles.seen_by(stage, stages.shards[stage], jointly=self.jointly), stages.slices_of(stage), stages.bounds[stage])

    @property
    def gradients_per_update(self) -> float:
        return parts.gradients_per_update(self.protocol, self.roles.lambda_, self.roles.streams)

    def check_schedule(self) -> None:
        """Raises ConfigError where it cannot be made: before anything is sent or written."""
        schedule.of_run(self.config, self.gradients_per_update, self.meta.train_samples)

    @property
    def begins_s(self) -> float:
        """Seconds that have passed before this attempt."""
        return 0.0 if self.resumption is None else self.resumption.checkpoint.now_s

    @property
    def attempt(self) -> int:
        return 0 if self.resumption is None else self.resumption.attempt

    def account(self, shard: int) -> Account | None:
        """What the checkpoint says of a shard, where the run goes on."""
        return None if self.resumption is None else self.resumption.checkpoint.parts[shard].account

    def first_seq(self, learner_id: int) -> int:
        return 0 if self.resumption is None else self.resumption.checkpoint.next_seq[learner_id]

    def spool(self, shard: int) -> Path:
        """The scratch file of a shard's snapshots."""
        return self.path / schema.spool_file(shard, 0 if self.resumption is None else self.resumption.layout)


class World(ABC):
    """Communicators, what computes, and what that costs where seconds are virtual.

    Attributes:
        tensors: the parts that compute; None where only sizes travel.
        progress: how shards and the evaluator tell of theirs, as `log.progress`.
        callbacks: the user's functions that are told of it, too.
    """

    tensors: Tensors | None
    may_leave = False
    """Whether learners may leave by themselves, while others go on."""
    saves = False
    """Whether shards write checkpoints."""
    progress: Any = "off"
    callbacks: Callbacks = NO_CALLBACKS

    @abstractmethod
    def wire(self, rank: int) -> Communicator: ...

    @abstractmethod
    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        """What a rank computes, in memory of its own, or shared; in a `group`, of its stage."""

    def buckets(self) -> list[Bucket]:
        """The parts in which gradients leave in an allreduce; none where they leave as a whole."""
        return []

    @abstractmethod
    def by_layers(self, rank: int, computed: Any, pushed: Travels, channel: Any) -> Computes:
        """The same, which tells `channel` of each slice, or bucket; `pushed` is what is pushed of what is `computed`."""

    @abstractmethod
    def update(self, rank: int, gradients_per_update: float) -> Updates:
        """The update of a shard's slice, from the initial weights or those of the checkpoint."""

    def group(self, rank: int, ranks: Sequence[int]) -> Group:
        """The ranks that are one learner; each of them calls this. Where ranks may be lost, whoever waits for one of them raises
        Broken when any is."""
        return self.wire(rank).team(ranks, [(0, 0) for _ in ranks])

    def weights(self, bounds: tuple[int, int]) -> Tensor:
        """A copy of the weights of a slice, (slice,) float32, by a rank that has no other use for the model."""
        assert self.tensors is not None
        return self.tensors.model.weights[slice(*bounds)].clone()

    def saved(self, rank: int) -> dict[str, Tensor]:
        """A shard's tensors from the checkpoint that the run goes on from; once."""
        raise ProtocolError(f"rank {rank}: nothing is saved here")

    def service(self, rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Called before a shard sums a gradient, and before it ends an evaluation: let the time pass that this is to cost."""
        return _nothing, _nothing

    def shared(self, node: Node) -> SharedMemory:
        """Memory for the weights and gradients of a node's ranks; all of them call this."""
        assert self.tensors is not None
        return SharedMemory.of(node, self.tensors.model.size)

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints | None:
        """What writes a shard's checkpoints, after these rows of the log; None = nothing does."""
        return None

    def sum_cost(self, rank: int, places: int) -> Callable[[], None]:
        """Called before a rank sums its part of the gradients of so many: lets the time pass that this is to cost."""
        return _nothing

    def warn(self, rank: int, text: str) -> None:  # noqa: B027 - where all is virtual, nobody looks on
        """A rank has something to say to people, even where progress is off."""


def _nothing() -> None:
    """In the real world all things take their own time."""
