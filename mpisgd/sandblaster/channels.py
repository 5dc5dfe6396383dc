"""The coordinator of a batch optimisation, and who talks to it: shards by commands, learners by questions (`sandblaster/`).

                 coordinator                                shard
    command      COMMAND                              ->    obeys, in the order of commands
                 posts RESULT; COMMAND                ->    obeys, and answers
                 <- RESULT
                 learner                                    coordinator
    next         posts DEAL; NEXT                     ->    keeps the question until there is something to do
                 <- DEAL: a portion, or: push, or: stop

No deadlock by construction. The coordinator and the shards send only to receives that are posted, but for commands, and a shard
always gets back to where it takes those: it waits for nobody. A learner waits for one at a time: for the coordinator, or for
shards. The coordinator waits for shards only until they have taken its commands, and answered.
"""

from __future__ import annotations

import math
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import Command, Ending, Fields, Goodbye, Interrupt, Message, Next, Op, Tag
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.chunks import chunks_of

_UNDER_WAY = 64
"""Commands that nobody answers may be under way, to each shard, before they are waited for."""


class CoordinatorChannel:
    """The coordinator's end.

    Attributes:
        signal: has told a rank to come to an end; 0 = none has.
    """

    def __init__(self, wire: Communicator, roles: Roles) -> None:
        self._wire = wire
        self._shards = roles.shard_ranks
        self._learners = roles.learner_ranks
        self._learner_of = {rank: learner_id for learner_id, rank in enumerate(roles.learner_ranks)}
        self._under_way: list[Any] = []
        self._over = False
        self._told = 0

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._wire.now_ns() * 1e-9

    @property
    def signal(self) -> int:
        return self._wire.signal or self._told

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        """Command it of all shards, unless they were told that all is over."""
        if self._over:
            return
        fields = (int(op), out, a, b, alpha, beta)
        self._under_way += [self._wire.start(rank, Tag.COMMAND, fields) for rank in self._shards]
        if len(self._under_way) >= _UNDER_WAY * len(self._shards):
            self._finish()

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        """As `do`; returns the answers of all shards. Raises PeerError where another answers."""
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
        """There are no more commands."""
        self.do(Op.FINISH, a=ending)
        self._over = True
        self._finish()

    def _finish(self) -> None:
        for sent in self._under_way:
            self._wire.finish(sent)
        self._under_way.clear()

    def receive(self) -> Next | Goodbye | Interrupt:
        """Wait for the next message of a learner. Raises PeerError for what cannot be."""
        taken = self._wire.take(((None, None),))
        assert taken is not None
        source, tag, fields = taken
        if tag == Tag.INTERRUPT:
            self._told = self._told or fields[0]
            return Interrupt(fields[0])
        if self._learner_of.get(source) != fields[0] or tag not in (Tag.NEXT, Tag.GOODBYE):
            raise PeerError(f"rank {source} sent {Tag(tag).name} to the coordinator: expected NEXT or GOODBYE of a learner", source)
        if tag == Tag.GOODBYE:
            return Goodbye(*fields)
        said = Next(*fields)
        self._told = self._told or said.signal
        return said

    def deal(self, learner_id: int, clock: int, portion: int, *, counts: bool) -> None:
        """Answer a learner: what it is to do, and whether what it has done counts."""
        wire = self._wire
        wire.finish(wire.start(self._learners[learner_id], Tag.DEAL, (clock, portion, int(counts))))


class Desk:
    """A learner's end: it asks the coordinator what to do."""

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
    ) -> tuple[int, int, bool]:
        """Tell what was done (`messages.Next`); returns clock and portion of what is next, and whether what was done counts."""
        wire = self._wire
        fields: Fields = (self._learner_id, clock, portion, samples, pushed, compute_ns, delay_ns, wire.signal, loss)
        asked = wire.ask(self._rank, Tag.NEXT, fields, Tag.DEAL)
        clock, portion, counts = wire.header(asked)
        wire.finish(asked)
        return clock, portion, bool(counts)

    def leave(self, pushed: int) -> None:
        """Say that this learner computes no more, while others go on."""
        wire = self._wire
        wire.finish(wire.start(self._rank, Tag.GOODBYE, (self._learner_id, pushed, int(Ending.NONE))))


class BatchShardChannel(ShardChannel):
    """A shard's end: it also takes commands."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int) -> None:
        super().__init__(wire, roles, shard)
        self._coordinator = roles.coordinator_rank

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        if tag == Tag.COMMAND and source == self._coordinator:
            return Command(*fields)
        return super()._news(source, tag, fields)

    def result(self, value: float, signal: int) -> None:
        """Answer a command; `signal` has told this rank, or one that told it so, to come to an end."""
        wire = self._wire
        wire.finish(wire.start(self._coordinator, Tag.RESULT, (self._shard, signal, value)))

    def give(self, learner_id: int, weights: Any, clock: int) -> None:
        """Answer a pull."""
        self.open_answers([learner_id], weights, clock, {})
        for chunk in chunks_of(weights):
            self.add_chunk(chunk)
        self.close_answers()
        self.finish_answers()
