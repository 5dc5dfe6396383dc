"""A shard's channel in a fault-tolerant run: the evaluator evaluates while alive, else shard 0.

The evaluator says goodbye to shard 0, which passes it on: no shard leaves before the evaluation ends. After the evaluator's loss
shard 0 evaluates everything again; without shard 0 there is no job.

A shard ending without a hanging learner tells the others (GIVEN_UP): the learner may yet go on and wait for this shard, silent to
them. No shard waits for the receipt, as others may be at their end, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Pattern
from mpisgd.comm.messages import NOTHING_MORE, Ending, Fields, GivenUp, Lost, Message, Tag
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel


class TolerantShardChannel(ShardChannel):
    """A shard's end; `roles` are the job's, `seen` its stage's view."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, seen: Roles | None = None) -> None:
        super().__init__(wire, seen or roles, shard)
        size = 1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank)
        self._learner_of_rank += [-1] * (size - len(self._learner_of_rank))  # any of these ranks may be reported lost
        self._groups = roles.groups
        if roles.groups:
            self.last_ending = Ending.BROKEN
        self._shard_ranks = list(roles.shard_ranks)
        self._first_evaluator = self._evaluator_rank = roles.evaluator_rank
        self._told: list[Any] = []
        """Messages to other shards, without need of receipt."""

    @property
    def evaluator_rank(self) -> int:
        """Rank allowed to pull snapshots."""
        return self._evaluator_rank

    @property
    def is_first(self) -> bool:
        return self._shard == 0

    @property
    def first_rank(self) -> int:
        return self._shard_ranks[0]

    @property
    def evaluates(self) -> bool:
        return self.is_first and self._evaluator_rank == self.first_rank

    def lose_evaluator(self) -> None:
        """Answer snapshot pulls of shard 0 from now on."""
        self._evaluator_rank = self._shard_ranks[0]

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take a rare message; an evaluator going on after being given up counts as lost."""
        if tag == Tag.SNAPSHOT_PULL and source == self._first_evaluator != self._evaluator_rank:
            return Lost(source, -1)
        return super()._seldom(source, tag, fields)

    def _check_evaluates(self, source: int, number: int) -> None:
        """Let shard 0 take the evaluator's place; only shard 0 may tell other shards of the end of evaluation."""
        if not self.is_first and source == self._shard_ranks[0]:
            if number != NOTHING_MORE:
                self.lose_evaluator()
        elif source != self._evaluator_rank or (number == NOTHING_MORE and not self.is_first):
            what = "announced the end of evaluation" if number == NOTHING_MORE else "pulled a snapshot"
            raise PeerError(f"rank {source} {what}: not the task of this rank", source)

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        """Return the patterns to take meanwhile; the evaluator is known only by its pulls."""
        seldom = ((None, tag) for tag in (Tag.PULL, Tag.SNAPSHOT_PULL, Tag.GIVEN_UP, Tag.INTERRUPT))
        return (self._learner_ranks[learner_id], None), *seldom

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        if tag == Tag.GIVEN_UP and source in self._shard_ranks and 0 <= fields[0] < len(self._learner_ranks):
            return GivenUp(fields[0])
        return super()._news(source, tag, fields)

    def pass_on_nothing_more(self) -> None:
        """Tell all other shards of the end of evaluation; shards take any message."""
        for rank in self._shard_ranks[1:]:
            self._wire.finish(self._wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE, 0)))

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        """Return the ranks without a sign of life; watch these from now on, instead of earlier ones."""
        return self._wire.presence.silent(ranks)

    def ranks_of(self, learner_id: int) -> tuple[int, ...]:
        """Return a learner's ranks, of all stages."""
        return self._groups[learner_id] if self._groups else (self._learner_ranks[learner_id],)

    def give_up_learner(self, learner_id: int) -> None:
        """Stop waiting for this learner, and for its group's ranks blocked by a hanging rank."""
        for rank in self.ranks_of(learner_id):
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        self._wire.presence.give_up(rank)

    def tell_given_up(self, learner_id: int) -> None:
        """Tell the other shards of going on, or ending, without a learner for good."""
        for rank in self._shard_ranks:
            if rank != self._shard_ranks[self._shard]:
                self._told.append(self._wire.start(rank, Tag.GIVEN_UP, (learner_id,)))
