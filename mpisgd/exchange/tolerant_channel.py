"""A shard's channel in a fault-tolerant run: the evaluator evaluates while it lives, and shard 0 where there is none.

The evaluator says its goodbye to shard 0 alone, which passes it on: so no shard leaves before the evaluation has come to its end.
Where the evaluator is lost, shard 0 evaluates all again; without shard 0 there is no job.

A shard that ends without a learner which hangs takes nothing of it any more. When that learner goes on it waits for this shard, and
says nothing to the others: so they are told, by GIVEN_UP. Nobody waits until that is taken, for they may be at their end, too.
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
    """A shard's end; `roles` are those of the job, `seen` what the shard's stage sees of them, where the model is cut."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, seen: Roles | None = None) -> None:
        super().__init__(wire, seen or roles, shard)
        size = 1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank)
        self._learner_of_rank += [-1] * (size - len(self._learner_of_rank))  # any of these may be told to be lost
        self._groups = roles.groups
        if roles.groups:
            self.last_ending = Ending.BROKEN
        self._shard_ranks = list(roles.shard_ranks)
        self._first_evaluator = self._evaluator_rank = roles.evaluator_rank
        self._told: list[Any] = []
        """What other shards were told, and need not take."""

    @property
    def evaluator_rank(self) -> int:
        """The rank whose snapshot pulls are answered."""
        return self._evaluator_rank

    @property
    def is_first(self) -> bool:
        """Whether this is shard 0, which evaluates where no other rank does."""
        return self._shard == 0

    @property
    def evaluates(self) -> bool:
        """Whether this shard's own rank evaluates."""
        return self.is_first and self._evaluator_rank == self._shard_ranks[0]

    def lose_evaluator(self) -> None:
        """Answer shard 0 from now on."""
        self._evaluator_rank = self._shard_ranks[0]

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what comes once in a run; an evaluator that was given up, and goes on, counts as lost."""
        if tag == Tag.SNAPSHOT_PULL and source == self._first_evaluator != self._evaluator_rank:
            return Lost(source, -1)
        return super()._seldom(source, tag, fields)

    def _check_evaluates(self, source: int, number: int) -> None:
        """Let shard 0 take the evaluator's place; that nothing more is evaluated, it alone says to other shards."""
        if not self.is_first and source == self._shard_ranks[0]:
            if number != NOTHING_MORE:
                self.lose_evaluator()
        elif source != self._evaluator_rank or (number == NOTHING_MORE and not self.is_first):
            what = "said that nothing more is evaluated" if number == NOTHING_MORE else "pulled a snapshot"
            raise PeerError(f"rank {source} {what}: it is not the one to do so", source)

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        """Patterns of what may come meanwhile; who evaluates is known only when it asks."""
        seldom = ((None, tag) for tag in (Tag.PULL, Tag.SNAPSHOT_PULL, Tag.GIVEN_UP, Tag.INTERRUPT))
        return (self._learner_ranks[learner_id], None), *seldom

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        if tag == Tag.GIVEN_UP and source in self._shard_ranks and 0 <= fields[0] < len(self._learner_ranks):
            return GivenUp(fields[0])
        return super()._news(source, tag, fields)

    def pass_on_nothing_more(self) -> None:
        """Tell all other shards that evaluation is over; they take whatever comes."""
        for rank in self._shard_ranks[1:]:
            self._wire.finish(self._wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE, 0)))

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        """Those of these ranks that give no sign of life, for which they are asked until others are."""
        return self._wire.presence.silent(ranks)

    def ranks_of(self, learner_id: int) -> tuple[int, ...]:
        """The ranks of a learner, of all stages."""
        return self._groups[learner_id] if self._groups else (self._learner_ranks[learner_id],)

    def give_up_learner(self, learner_id: int) -> None:
        """Wait no more for this learner, nor for the ranks of its group that wait for the one that hangs."""
        for rank in self.ranks_of(learner_id):
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """Wait for this rank no more."""
        self._wire.presence.give_up(rank)

    def tell_given_up(self, learner_id: int) -> None:
        """Tell the other shards that this one goes on, or ends, without a learner for good."""
        for rank in self._shard_ranks:
            if rank != self._shard_ranks[self._shard]:
                self._told.append(self._wire.start(rank, Tag.GIVEN_UP, (learner_id,)))
