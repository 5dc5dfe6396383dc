"""What a role is made of in its world, real or virtual (DESIGN 3), and what follows there when a rank dies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from mpisgd.comm.communicator import Communicator
from mpisgd.exchange.channel import LearnerChannel, ShardChannel
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.serving.faults import Faults
from mpisgd.serving.succession import Succession
from mpisgd.shard import Shard
from mpisgd.vectors.computing import Computes, Travels, Updates


class FailFast:
    """A rank that dies ends the job."""

    tolerant = False

    def server(self, wire: Communicator, roles: Roles, shard: int, make: Callable[[ShardChannel], Shard]) -> Shard:
        """A shard, which `make` makes, at its end of the wire."""
        return make(ShardChannel(wire, roles, shard))

    def before_learning(self, channel: LearnerChannel) -> None:
        """Nothing is to be asked for."""

    def is_to_evaluate(self, channel: LearnerChannel, chosen: bool) -> bool:
        """Whether a learner that has said goodbye evaluates; `chosen`: the roles say so."""
        return chosen


class Tolerant(FailFast):
    """Learners may die or hang, and the others go on; shard 0 says who evaluates.

    Args:
        patience_s: how long a learner may owe something.
        hosts: host name of each rank.
    """

    tolerant = True

    def __init__(self, patience_s: float, hosts: Sequence[str]) -> None:
        self._patience_s = patience_s
        self._hosts = hosts

    def server(self, wire: Communicator, roles: Roles, shard: int, make: Callable[[ShardChannel], Shard]) -> Shard:
        channel = TolerantShardChannel(wire, roles, shard)
        server = make(channel)
        succession = Succession(dedicated=roles.dedicated_evaluator) if shard == 0 else None
        name = f"shard {shard} on {self._hosts[roles.shard_ranks[shard]]}"
        Faults(server, channel, self._patience_s, succession, name)
        return server

    def before_learning(self, channel: LearnerChannel) -> None:
        channel.ask_for_duty()

    def is_to_evaluate(self, channel: LearnerChannel, chosen: bool) -> bool:
        return channel.duty()


class World(ABC):
    """The world of a job's ranks: communicators, what computes, and what that costs.

    Attributes:
        tolerance: what follows when a rank dies.
        closing: closes files when the ranks have come to their end, also a bad one.
        shows_progress: somebody looks on while the job runs.
        saves: shards write checkpoints.
    """

    tolerance: FailFast
    closing: ExitStack
    shows_progress: bool
    saves: bool

    @abstractmethod
    def wire(self, rank: int) -> Communicator:
        """A rank's end of the wire."""

    @abstractmethod
    def gradient(self, rank: int) -> Travels:
        """What a rank computes."""

    @abstractmethod
    def by_layers(self, rank: int, gradient: Any, channel: Any) -> Computes:
        """The same gradient, in passes that tell `channel` (`layerwise.PipelinedChannel`) of each slice."""

    @abstractmethod
    def update(self, rank: int, gradients_per_update: float) -> Updates:
        """The update of a shard's slice, from the initial weights; of so many gradients that normally make one."""

    @abstractmethod
    def snapshots(self, path: Path, update: Any, resumed: Sequence[Sequence[float]]) -> Snapshots:
        """Where copies of a shard's weights for evaluation go; `path` and `resumed` are as in `Snapshots`."""

    @abstractmethod
    def evaluate(self, channel: Callable[..., EvaluatorChannel], log: EvaluatorLog, weights_file: Path, first: int) -> None:
        """Evaluate all snapshots from this one on; `channel` wants the memory to pull into: `weights`, `averaged`."""

    def failing(self, rank: int, channel: LearnerChannel | None) -> AbstractContextManager[object]:
        """Around a rank's loop: what follows when the rank fails within; `channel` is None where it cannot leave alone."""
        return ExitStack()

    def sum_cost(self, rank: int, places: int) -> Callable[[], None]:
        """Called whenever a rank sums its part of the gradients of so many: lets the time pass that this is to cost."""
        return _nothing

    def warn(self, rank: int, text: str) -> None:  # noqa: B027 - where all is virtual, so is this
        """A rank has something to say to people, at once."""


def _nothing() -> None:
    """In the real world all things take their own time."""
