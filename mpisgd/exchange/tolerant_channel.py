"""A shard's channel in a fault-tolerant run: who evaluates may change, and shard 0 says who does (`succession.py`).

A learner's goodbye to shard 0 is answered: DUTY says whether it is to evaluate, and how many were appointed
before (`LearnerChannel.duty`). The evaluator says its own
goodbye to shard 0 alone, which passes it on: so no shard leaves before somebody has come to the end of the evaluation.

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
        seen = seen or roles
        super().__init__(wire, seen, shard)
        size = 1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank)
        self._learner_of_rank += [-1] * (size - len(self._learner_of_rank))  # any of these may be told to be lost
        self.is_first = shard == 0
        """Whether this shard decides who evaluates."""
        self._groups = roles.groups
        self._of_first_stage = seen.learner_ranks == roles.learner_ranks
        if roles.groups:
            self.last_ending = Ending.BROKEN
        self._shard_ranks = list(roles.shard_ranks)
        self._dedicated = roles.evaluator_rank if roles.dedicated_evaluator else -1
        self._evaluator_rank = self._dedicated
        self._parted = set[int]()
        """Ranks of learners that have said goodbye: any of them may be appointed. Of groups, for other stages than the first,
        all first ranks: these say goodbye elsewhere."""
        if not self._of_first_stage:
            self._parted.update(roles.learner_ranks)
        self._given_up = set[int]()
        self.last_appointed = len(roles.computing_ranks)
        self._appointed = 0
        """As the how-manieth the evaluator was appointed, as far as is known here."""
        self._told: list[Any] = []
        """What other shards were told, and need not take."""

    @property
    def evaluator_rank(self) -> int:
        """Whose snapshot pulls are answered."""
        return self._evaluator_rank

    @property
    def dedicated_rank(self) -> int:
        """The evaluator that is no learner; -1 = there is none."""
        return self._dedicated

    def has_parted(self, learner_id: int) -> None:
        """A learner has said goodbye, as it must."""
        if self._of_first_stage:
            self._parted.add(self._learner_ranks[learner_id])

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what comes once in a run. Snapshots are pulled by who may evaluate; only shard 0 says that nothing more will be."""
        if tag == Tag.SNAPSHOT_PULL and not self._may_pull(source, fields[0], fields[2]):
            if source in self._given_up or 0 <= fields[2] < self._appointed:  # it does not know
                return Lost(source, self._learner_of_rank[source])
            what = "said that nothing more is evaluated" if fields[0] == NOTHING_MORE else "pulled a snapshot"
            raise PeerError(f"rank {source} {what}: it is not the one to do so", source)
        return super()._seldom(source, tag, fields)

    def _may_pull(self, source: int, number: int, appointed: int) -> bool:
        """Whether it is the evaluator's to ask. What one that another follows has asked may come later than what that one asks, for
        it need not be dead: it must not take the place back."""
        if self._shard == 0:  # which has another evaluate in the place of one that it has given up
            return source == self._evaluator_rank and source not in self._given_up
        if number == NOTHING_MORE:
            return source == self._shard_ranks[0]
        return (source == self._dedicated or source in self._parted) and appointed >= self._appointed

    def _succeeds(self, rank: int, appointed: int) -> None:
        """Whoever shard 0 has appointed; or shard 0 itself, which passes on that nothing more will be asked for."""
        if rank != self._shard_ranks[0]:
            self._evaluator_rank, self._appointed = rank, appointed

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        """Patterns of what may come meanwhile; who evaluates is known only when it asks."""
        seldom = ((None, tag) for tag in (Tag.PULL, Tag.SNAPSHOT_PULL, Tag.GIVEN_UP, Tag.INTERRUPT))
        return (self._learner_ranks[learner_id], None), *seldom

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        if tag == Tag.GIVEN_UP and source in self._shard_ranks and 0 <= fields[0] < len(self._learner_ranks):
            return GivenUp(fields[0])
        return super()._news(source, tag, fields)

    def answer_goodbye(self, learner_id: int, appointed: int) -> None:
        """Tell a learner that has said goodbye as the how-manieth it is to evaluate; 0: it is not."""
        if appointed:
            self._evaluator_rank, self._appointed = self._learner_ranks[learner_id], appointed
        self._wire.finish(self._wire.start(self._learner_ranks[learner_id], Tag.DUTY, (appointed,)))

    def pass_on_nothing_more(self) -> None:
        """Tell all other shards that evaluation is over; they take whatever comes."""
        for rank in self._shard_ranks[1:]:
            self._wire.finish(self._wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE, 0, 0)))

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
        self._given_up.add(rank)
        self._wire.presence.give_up(rank)

    def tell_given_up(self, learner_id: int) -> None:
        """Tell the other shards that this one goes on, or ends, without a learner for good."""
        for rank in self._shard_ranks:
            if rank != self._shard_ranks[self._shard]:
                self._told.append(self._wire.start(rank, Tag.GIVEN_UP, (learner_id,)))
