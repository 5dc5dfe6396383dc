"""A shard's channel in a fault-tolerant run: who evaluates may change, and shard 0 says who does (`succession.py`).

A learner's goodbye to shard 0 is answered: DUTY says whether it is to evaluate, and how many were appointed
before (`LearnerChannel.duty`). The evaluator says its own
goodbye to shard 0 alone, which passes it on: so no shard leaves before somebody has come to the end of the evaluation.

A shard that ends without a learner which hangs takes nothing of it any more. When that learner goes on it waits for this shard, and
says nothing to the others: so they are told, by GIVEN_UP. Nobody waits until that is taken, for they may be at their end, too.
The same is said of a learner whose place a spare had that is dead, with none to follow: it may not have told all (`spares.py`).

    spare                                      shard
    posts APPOINTED                      <-    shard 0 alone: a learner is dead, take its place; or go, for the run is over
    posts GOES_ON; SUCCEEDS header       ->    the rank is that learner from now on; what the dead one has sent counts no more
                                         <-    GOES_ON: the last mini-batch that has come of the learner in this attempt
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Pattern
from mpisgd.comm.messages import NOTHING_MORE, Ending, Fields, GivenUp, Goodbye, Lost, Message, Succeeds, Tag
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel


class TolerantShardChannel(ShardChannel):
    """A shard's end; `roles` are those of the job, `seen` what the shard's stage sees of them, where the model is cut."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, seen: Roles | None = None) -> None:
        seen = seen or roles
        super().__init__(wire, seen, shard)
        size = 1 + max(*roles.shard_ranks, *roles.computing_ranks, *roles.spare_ranks, roles.evaluator_rank)
        self._learner_of_rank += [-1] * (size - len(self._learner_of_rank))  # any of these may be told to be lost
        self.is_first = shard == 0
        """Whether this shard decides who evaluates, and whose places spares take."""
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
        self.last_appointed = len(roles.computing_ranks) + len(roles.spare_ranks)
        self._appointed = 0
        """As the how-manieth the evaluator was appointed, as far as is known here."""
        self._told: list[Any] = []
        """What other shards and spares were told, and need not take."""
        self.spare_ranks = roles.spare_ranks
        self._pushed_before = [0] * len(self._learner_ranks)
        """Per learner, what those had pushed whose place another rank has taken."""

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

    def appoint(self, rank: int, learner_id: int) -> None:
        """Tell a spare whose place it is to take; -1: the run is over. It may hang: nobody waits until it has heard."""
        self._told.append(self._wire.start(rank, Tag.APPOINTED, (learner_id,)))

    def lose(self, rank: int) -> None:
        """Take nothing more of a rank that is dead, whether MPI has said so here or not."""
        self._wire.presence.lose(rank)

    def succeed(self, learner_id: int, rank: int, pushed: int, last_seq: int) -> None:
        """A spare is this learner from now on, which has pushed so many times to this shard, its mini-batch `last_seq` last."""
        self._learner_of_rank[self._learner_ranks[learner_id]] = -1
        self._learner_ranks[learner_id] = rank
        self._learner_of_rank[rank] = learner_id
        self._notices[learner_id] = 0
        self._pushed_before[learner_id] = pushed
        self._told.append(self._wire.start(rank, Tag.GOES_ON, (last_seq,)))

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what comes once in a run. Snapshots are pulled by who may evaluate; only shard 0 says that nothing more will be."""
        if tag == Tag.SNAPSHOT_PULL and not self._may_pull(source, fields[0], fields[2]):
            if source in self._given_up or 0 <= fields[2] < self._appointed:  # it does not know
                return Lost(source, self._learner_of_rank[source])
            what = "said that nothing more is evaluated" if fields[0] == NOTHING_MORE else "pulled a snapshot"
            raise PeerError(f"rank {source} {what}: it is not the one to do so", source)
        message = super()._seldom(source, tag, fields)
        if isinstance(message, Goodbye):
            return message._replace(pushed=message.pushed + self._pushed_before[message.learner_id])
        return message

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
        seldom = ((None, tag) for tag in (Tag.PULL, Tag.SUCCEEDS, Tag.SNAPSHOT_PULL, Tag.GIVEN_UP, Tag.INTERRUPT))
        return (self._learner_ranks[learner_id], None), *seldom

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        if tag == Tag.GIVEN_UP and source in self._shard_ranks and 0 <= fields[0] < len(self._learner_ranks):
            return GivenUp(fields[0])
        is_spare = source in self.spare_ranks and self._learner_of_rank[source] < 0
        if tag == Tag.SUCCEEDS and is_spare and 0 <= fields[0] < len(self._learner_ranks):
            return Succeeds(source, fields[0])
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


class SpareChannel:
    """A spare's end: it waits for its place. Made before the clock starts, when shard 0 may appoint it."""

    def __init__(self, wire: Communicator, roles: Roles) -> None:
        self._wire = wire
        self._ranks = roles.shard_ranks
        self._appointed = wire.post(self._ranks[0], Tag.APPOINTED)
        self._told: list[Any] = []

    def wait(self) -> int:
        """The learner whose place is to be taken; -1 where the run is over. A signal that comes meanwhile is told to the shards."""
        wire = self._wire
        wire.header_or_signal(self._appointed)
        if wire.signal > 0:  # which they need not take: they may be at their end
            self._told = [wire.start(rank, Tag.INTERRUPT, (wire.signal,)) for rank in self._ranks]
        fields: tuple[int] = wire.header(self._appointed)
        wire.finish(self._appointed)
        return fields[0]

    def succeed(self, learner_id: int, first_seq: int) -> int:
        """Tell each shard whose place this rank takes. Returns the mini-batch to go on with: the one after the last that any shard
        has had of this learner in this attempt, or its first.

        Shard 0 is told last: what it hears, all others have heard.
        """
        wire, last = self._wire, first_seq - 1
        for rank in reversed(self._ranks):
            answer = wire.ask(rank, Tag.SUCCEEDS, (learner_id,), Tag.GOES_ON)
            (seq,) = wire.header(answer)
            wire.finish(answer)
            last = max(last, seq)
        return last + 1
