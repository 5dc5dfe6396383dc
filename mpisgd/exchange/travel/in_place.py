"""Push and pull in memory that learners and shards of a node share: only headers are sent.

                 learner                                    shard
    compute      from the shards' weights into an outbox
    push         PUSH header                          ->    sums in outboxes
    pull         PULL header                          ->    makes the update in place
                 <- ANSWER header

A gradient may be part of a sum while the next is prepared: two outboxes take turns (a GPU prepares elsewhere). Nobody reads weights
being changed: all learners wait for each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Buffer, Communicator
from mpisgd.comm.messages import Push, Tag
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.vectors.body import Body, Pool
from mpisgd.vectors.memory import outbox_of

OUTBOXES = 2
"""At most, of a learner."""


def ranks_of(roles: Roles) -> list[int]:
    """Return the ranks that share memory."""
    return list(dict.fromkeys([*roles.shard_ranks, *roles.learner_ranks]))


def seen_by(shared: SharedMemory, roles: Roles, rank: int) -> list[np.ndarray]:
    """Return the vectors that a rank reads or writes."""
    slots = shared.slots[len(roles.shard_ranks) :] if rank in roles.shard_ranks else [shared.own]
    return [shared.own.weights, *(outbox for slot in slots for outbox in slot.outboxes)]


def outboxes_of(shared: SharedMemory | None, roles: Roles, bounds: tuple[int, int]) -> list[list[Any]]:
    """Return a slice of each learner's outboxes."""
    slots = () if shared is None else shared.slots[len(roles.shard_ranks) :]
    return [[outbox[slice(*bounds)] for outbox in slot.outboxes] for slot in slots]


class InPlaceShardChannel(ShardChannel):
    """A shard's end; `outboxes`: each learner's, as bodies."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, outboxes: Sequence[Sequence[Body]]) -> None:
        super().__init__(wire, roles, shard)
        self._outboxes = outboxes
        self._put_off: list[tuple[list[int], Any, int, dict[int, int]]] = []
        """Answers until the weights are made."""

    def _take_body(self, push: Push, bodies: Pool) -> bool:
        push.body = outbox_of(self._outboxes[push.learner_id], push.seq)
        return self._wire.take_body(push.runs.reshape(-1)) if push.skipped else True

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        for learner_id in learner_ids:
            fields = self._answer(learner_id, clock, verdicts, weights.nbytes)
            self._under_way.append(self._wire.start(self.rank_of(learner_id), Tag.ANSWER, fields))

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        self._put_off.append((learner_ids, weights, clock, verdicts))

    def add_chunk(self, chunk: Buffer) -> None:
        """Do nothing: the chunk is in its place."""

    def close_answers(self) -> None:
        put_off, self._put_off = self._put_off, []
        for answers in put_off:
            self.start_answers(*answers)

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        super().stop(learner_id, clock, ending, 0)
