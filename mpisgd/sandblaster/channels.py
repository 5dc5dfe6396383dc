"""Channels of a batch optimisation: the coordinator commands shards, and answers learners.

                 coordinator                                shard
    command      COMMAND                              ->    obeys, in order
                 posts RESULT; COMMAND                ->    obeys, and answers
                 <- RESULT
                 learner                                    coordinator
    next         posts DEAL; NEXT                     ->    waits until there is work
                 <- DEAL: a portion, push, or stop
                 learner                                    shard
    push         posts TAKEN; PUSH, GRADIENT          ->    parks
                 <- TAKEN: whole or torn (where ranks may be lost)

No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import NOBODY, Ending, Fields, Goodbye, Interrupt, Lost, Next, Op, Tag
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.exchange.roles import Roles

_UNDER_WAY = 64
"""Most unanswered commands to each shard."""


class CoordinatorChannel:
    """Coordinator's end; `signal`: of any rank; 0 = none."""

    def __init__(self, wire: Communicator, roles: Roles) -> None:
        self._wire = wire
        self._shards = roles.shard_ranks
        self._learners = roles.learner_ranks
        self._learner_of = {rank: learner_id for learner_id, rank in enumerate(roles.learner_ranks)}
        self._under_way: list[Any] = []
        self._dealt: dict[int, Any] = {}
        self._over = False
        self._told = 0

    def now_s(self) -> float:
        return self._wire.clock.now_ns() * 1e-9

    @property
    def signal(self) -> int:
        return self._wire.signal or self._told

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        if self._over:
            return
        fields = (int(op), out, a, b, alpha, beta)
        self._under_way += [self._wire.start(rank, Tag.COMMAND, fields) for rank in self._shards]
        if len(self._under_way) >= _UNDER_WAY * len(self._shards):
            self._finish()

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        """Command all shards; return the answers. Raises PeerError where another shard answers."""
        wire, fields = self._wire, (int(op), out, a, b, alpha, beta)
        asked = [wire.ask(rank, Tag.COMMAND, fields, Tag.RESULT) for rank in self._shards]
        values = []
        for shard, answer in enumerate(asked):
            sender, signal, value = wire.header(answer)
            wire.finish(answer)
            if sender != shard:
                raise PeerError(f"RESULT of rank {self._shards[shard]}: shard {sender}, expected {shard}", self._shards[shard])
            self._told = self._told or signal
            values.append(value)
        self._finish()
        return values

    def finish(self, ending: Ending) -> None:
        self.do(Op.FINISH, a=ending)
        self._over = True
        self._finish()

    def _finish(self) -> None:
        for sent in self._under_way:
            self._wire.finish(sent)
        self._under_way.clear()

    def receive(self, until_s: float = math.inf) -> Next | Goodbye | Interrupt | Lost | None:
        """Return the next message of a learner, or None at `until_s`. Raises PeerError for an impossible message."""
        taken = self._wire.take(((None, None),), None if until_s == math.inf else math.ceil(until_s * 1e9))
        if taken is None:
            return None
        source, tag, fields = taken
        if tag == Tag.LOST and fields[0] == NOBODY:
            return Lost(source, self._learner_of.get(source, -1))
        if tag == Tag.STUCK and fields[0] == NOBODY:
            return None
        if tag == Tag.INTERRUPT:
            self._told = self._told or fields[0]
            return Interrupt(fields[0])
        if self._learner_of.get(source) != fields[0] or tag not in (Tag.NEXT, Tag.GOODBYE):
            raise PeerError(f"rank {source} sent {Tag(tag).name} to the coordinator: expected NEXT or GOODBYE of a learner", source)
        if tag == Tag.GOODBYE:
            return Goodbye(*fields)
        said = Next(*fields)
        self._told = self._told or said.signal
        self.finish_deals([said.learner_id])
        return said

    def deal(self, learner_id: int, clock: int, portion: int, *, counts: int) -> None:
        """Answer a learner; `counts`: whether its last result counts, or FORGET.

        The send is finished at the next question (`receive`): a learner may hang.
        """
        self._dealt[learner_id] = self._wire.start(self._learners[learner_id], Tag.DEAL, (clock, portion, counts))

    def silent(self, learner_ids: Iterable[int]) -> bool:
        """Watch these learners alone; return whether all, at least one, give no sign of life."""
        ranks = {self._learners[learner_id] for learner_id in learner_ids}
        return bool(ranks) and self._wire.presence.silent(ranks) == ranks

    def finish_deals(self, learner_ids: Iterable[int]) -> None:
        for learner_id in learner_ids:
            if learner_id in self._dealt:
                self._wire.finish(self._dealt.pop(learner_id))

    def fail(self) -> None:
        """Send no more, not even FREE: this rank fails."""
        self._over = True


class PortionChannel:
    """Learner's end towards the coordinator."""

    def __init__(self, wire: Communicator, roles: Roles, learner_id: int) -> None:
        self._wire = wire
        self._rank = roles.coordinator_rank
        self._learner_id = learner_id

    def next(
        self,
        clock: int,
        portion: int = -1,
        samples: int = 0,
        loss: float = math.nan,
        *,
        pushed: int = -1,
        compute_ns: int = 0,
        delay_ns: int = 0,
    ) -> tuple[int, int, int]:
        """Tell the last result (`messages.Next`); return the next clock and portion, and whether the result counts, or FORGET."""
        wire = self._wire
        fields: Fields = (self._learner_id, clock, portion, samples, pushed, compute_ns, delay_ns, wire.signal, loss)
        asked = wire.ask(self._rank, Tag.NEXT, fields, Tag.DEAL)
        clock, portion, counts = wire.header(asked)
        wire.finish(asked)
        return clock, portion, counts

    def leave(self, pushed: int) -> None:
        wire = self._wire
        wire.finish(wire.start(self._rank, Tag.GOODBYE, (self._learner_id, pushed, int(Ending.NONE))))


class Receipts:
    """Confirmations of a learner's pushes by `ranks`."""

    def __init__(self, wire: Communicator, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._ranks = ranks

    def push(self, channel: LearnerChannel, report: Report) -> bool:
        """Push; return whether all shards have the whole."""
        wire, all_whole = self._wire, True
        posted = [wire.post(rank, Tag.TAKEN) for rank in self._ranks]
        channel.push(report)
        for each in posted:
            _, seq, whole = wire.header(each)
            wire.finish(each)
            if seq != report.seq:
                raise PeerError(f"TAKEN says push {seq}, expected {report.seq}")
            all_whole = all_whole and bool(whole)
        return all_whole
