"""Other ranks of a fault-tolerant job, as a shard sees them. The evaluator evaluates while alive, else shard 0.

The evaluator says goodbye to shard 0, which tells the others: no shard leaves before the evaluation ends. After the evaluator's
loss shard 0 evaluates everything again; without shard 0 there is no job.

A shard ending without a hanging learner tells the others (GIVEN_UP): the learner may yet go on and wait for this shard. The receipt
is not awaited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Pattern
from mpisgd.comm.messages import NOTHING_MORE, Ending, Fields, GivenUp, Tag
from mpisgd.exchange.roles import Roles


class Survivors:
    """Evaluator, learners of all stages, and other shards; `roles` are the job's.

    Attributes:
        evaluator_rank: the rank allowed to pull snapshots.
        is_first: this is shard 0.
    """

    def __init__(self, wire: Communicator, roles: Roles, shard: int) -> None:
        self._wire = wire
        self._roles = roles
        self._own_rank = roles.shard_ranks[shard]
        self.first_rank = roles.shard_ranks[0]
        self.is_first = shard == 0
        self.evaluator_rank = roles.evaluator_rank
        self.last_ending = Ending.BROKEN if roles.groups else Ending.INTERRUPTED
        self._told: list[Any] = []
        """Messages to other shards, without need of receipt."""

    @property
    def size(self) -> int:
        """Count of ranks up to the last that may be lost."""
        roles = self._roles
        return 1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank)

    @property
    def evaluates(self) -> bool:
        return self.is_first and self.evaluator_rank == self.first_rank

    def lose_evaluator(self) -> None:
        """Answer snapshot pulls of shard 0 from now on."""
        self.evaluator_rank = self.first_rank

    def has_lost(self, source: int) -> bool:
        """Return whether a rank is an evaluator that was given up."""
        return source == self._roles.evaluator_rank != self.evaluator_rank

    def check_evaluates(self, source: int, number: int) -> None:
        """Let shard 0 take the evaluator's place; only shard 0 may tell other shards of the end of evaluation."""
        if not self.is_first and source == self.first_rank:
            if number != NOTHING_MORE:
                self.lose_evaluator()
        elif source != self.evaluator_rank or (number == NOTHING_MORE and not self.is_first):
            what = "announced the end of evaluation" if number == NOTHING_MORE else "pulled a snapshot"
            raise PeerError(f"rank {source} {what}: not the task of this rank", source)

    def patterns(self) -> tuple[Pattern, ...]:
        """Return the messages to take meanwhile; the evaluator is known only by its pulls."""
        return tuple((None, tag) for tag in (Tag.PULL, Tag.SNAPSHOT_PULL, Tag.GIVEN_UP, Tag.INTERRUPT))

    def given_up(self, source: int, fields: Fields) -> GivenUp | None:
        return GivenUp(*fields) if source in self._roles.shard_ranks and 0 <= fields[0] < self._roles.lambda_ else None

    def pass_on_nothing_more(self) -> None:
        """Tell all other shards of the end of evaluation."""
        for rank in self._roles.shard_ranks[1:]:
            self._wire.finish(self._wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE, 0)))

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        """Return the ranks without a sign of life; watch these from now on, instead of earlier ones."""
        return self._wire.presence.silent(ranks)

    def ranks_of(self, learner_id: int) -> tuple[int, ...]:
        return self._roles.groups[learner_id] if self._roles.groups else (self._roles.learner_ranks[learner_id],)

    def give_up_learner(self, learner_id: int) -> None:
        """Stop waiting for this learner, and for its group's ranks blocked by a hanging rank."""
        for rank in self.ranks_of(learner_id):
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        self._wire.presence.give_up(rank)

    def tell_given_up(self, learner_id: int, clock: int) -> None:
        """Tell other shards; `clock` as in `GivenUp`."""
        for rank in self._roles.shard_ranks:
            if rank != self._own_rank:
                self._told.append(self._wire.start(rank, Tag.GIVEN_UP, (learner_id, clock)))
