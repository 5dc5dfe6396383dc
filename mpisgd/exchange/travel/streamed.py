"""Push and pull in chunks, both ways at once, for protocols where weights wait for gradients.

                 learner                                    shard
    pull         posts ANSWER and its PARTs; PULL      ->   keeps the request
    push         PUSH headers; PARTs, a few at once    ->   posts receives for the first PARTs (`vectors/body.py`)
                 of all slices, in one order                after all wanted headers, chunk by chunk:
                 <- ANSWER header, PARTs when made          receives, sums, updates, sends, posts the next

The bits are those of `whole`. Rounded weights leave whole (`deltas.py`). For an unwanted gradient, and before a learner is told to
stop, the shard posts all receives, and waits for none. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Communicator, Pattern
from mpisgd.comm.messages import Goodbye, Message, Push, Refused, Tag
from mpisgd.exchange.learner_channel import LearnerChannel, Slices, bodies_of
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.rounds import DUPLEX
from mpisgd.exchange.shard_channel import EMPTY, ShardChannel
from mpisgd.rules.portions import NO_PORTION
from mpisgd.vectors.body import WINDOW, Incoming, Stream
from mpisgd.vectors.chunks import count_of, cuts


class StreamedChannel(LearnerChannel):
    def __init__(self, wire: Communicator, roles: Roles, learner_id: int, slices: Slices, *, consistent: bool) -> None:
        super().__init__(wire, roles, learner_id, slices, consistent=consistent, when=DUPLEX)
        count = count_of(slices.bounds)
        self._pieces = [list(cuts(nbytes, count)) for nbytes in self._weights_nbytes]
        # all slices are complete at once, large or small
        ends = [
            ((number + 1) / len(pieces), shard, piece)
            for shard, pieces in enumerate(self._pieces)
            for number, piece in enumerate(pieces)
        ]
        self._order = [(shard, piece) for _, shard, piece in sorted(ends, key=lambda each: each[:2])]
        whole = [slices.weights[start:end] for start, end in slices.bounds]
        self._rooms = [[room[piece] for piece in pieces] for room, pieces in zip(whole, self._pieces, strict=True)]

    def _send_noted(self) -> list[Any]:
        start, ranks = self._wire.start, self._ranks
        noted, self._noted = self._noted, []
        self._pushes += 1
        sent = []
        for rank, (told, runs) in zip(ranks, noted, strict=True):
            sent.append(start(rank, Tag.PUSH, told))
            sent += [start(rank, Tag.PART, (each.nbytes,), each) for each in bodies_of(runs)]
        under_way = deque[Any]()
        for shard, piece in self._order:
            if len(under_way) == WINDOW * len(ranks):
                self._wire.finish(under_way.popleft())
            part = self._gradients[shard][piece]
            under_way.append(start(ranks[shard], Tag.PART, (part.nbytes,), part))
        return [*sent, *under_way]

    def _ask(self, shards: list[int], min_clock: int) -> list[Any]:
        if self._held is not None:
            return super()._ask(shards, min_clock)
        wire, question = self._wire, (self._learner_id, min_clock)
        asked = []
        for shard in shards:
            rank = self._ranks[shard]
            parts = [wire.post(rank, Tag.PART, room) for room in self._rooms[shard]]
            asked.append((wire.ask(rank, Tag.PULL, question, Tag.ANSWER), parts))
        return asked

    def _take_answers(self, shards: list[int], asked: list[Any], min_clock: int) -> tuple[int, int]:
        if self._held is not None:
            return super()._take_answers(shards, asked, min_clock)
        told = super()._take_answers(shards, [answer for answer, _ in asked], min_clock)
        for _, parts in asked:
            for part in parts:
                self._wire.header(part)
                self._wire.finish(part)
        return told


#: Tags taken on arrival; parts are received in their turn.
_HEADERS = tuple((None, tag) for tag in (Tag.PULL, Tag.PUSH, Tag.GOODBYE, Tag.SNAPSHOT_PULL, Tag.INTERRUPT))


class _Parts(Stream):
    def __init__(self, wire: Communicator, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._posted = deque[Any]()

    def post(self, room: Any) -> None:
        self._posted.append(self._wire.post(self._rank, Tag.PART, room))

    def wait(self) -> None:
        part = self._posted.popleft()
        self._wire.header(part)
        self._wire.finish(part)


class StreamedShardChannel(ShardChannel):
    """A shard's end; gradients are received into a `ChunkPool`.

    `rounded`: weights travel as bfloat16, thus whole.
    """

    def __init__(self, wire: Communicator, roles: Roles, shard: int, *, rounded: bool = False) -> None:
        super().__init__(wire, roles, shard)
        self._rounded = rounded
        self._anybody = _HEADERS
        self._incoming: dict[int, Incoming] = {}
        self._stopped = set[int]()

    def _take_body(self, push: Push, bodies: Any) -> bool:
        """Receive a push's skipped runs, its first part, by tag: the learner's earlier pull may not be taken yet."""
        if push.skipped:
            part = self._wire.post(self.rank_of(push.learner_id), Tag.PART, push.runs.reshape(-1))
            self._wire.header(part)
            self._wire.finish(part)
        return True

    def receive(
        self,
        bodies: Any,
        learner_id: int | None = None,
        until_s: float = math.inf,
        patterns: tuple[Pattern, ...] | None = None,
    ) -> Message | None:
        """Return the next message; begin to receive a push's chunks.

        Raises PeerError: an impossible push header, as its chunks would wait for ever.
        """
        message = super().receive(bodies, learner_id, until_s, patterns)
        if isinstance(message, Refused) and message.push:
            raise PeerError(f"{message.why}; streamed, nobody can go on without this push")
        if isinstance(message, Push | Goodbye) and (before := self._incoming.pop(message.learner_id, None)) is not None:
            before.settle()  # all of it has left the learner
        if isinstance(message, Push):
            message.body = self._incoming[message.learner_id] = bodies.begin(_Parts(self._wire, self.rank_of(message.learner_id)))
            if message.learner_id in self._stopped:
                message.body.land()
        return message

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        if self._rounded:
            super().start_answers(learner_ids, weights, clock, verdicts)
            return
        self.open_answers(learner_ids, weights, clock, verdicts)
        self.add_chunk(weights)
        self.close_answers()

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        start, nbytes = self._wire.start, weights.nbytes
        for learner_id in learner_ids:
            rank = self._learner_ranks[learner_id]
            self._under_way.append(start(rank, Tag.ANSWER, self._answer(learner_id, clock, verdicts, nbytes)))
            self._opened.append(rank)
            self._under_way += [start(rank, Tag.PART, (chunk.nbytes,), chunk) for chunk in self._chunks]

    def add_chunk(self, chunk: Buffer) -> None:
        self._chunks.append(chunk)
        self._under_way += [self._wire.start(rank, Tag.PART, (chunk.nbytes,), chunk) for rank in self._opened]

    def close_answers(self) -> None:
        self._opened.clear()
        self._chunks.clear()

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        self._stopped.add(learner_id)
        if learner_id in self._incoming:
            self._incoming[learner_id].land()
        if self._rounded:
            super().stop(learner_id, clock, ending, chunks)
            return
        wire, rank = self._wire, self._learner_ranks[learner_id]
        fields = self._shard, clock, ending, 0, self._notices[learner_id], NO_PORTION, 0, 0
        begun = [wire.start(rank, Tag.ANSWER, fields)]
        begun += [wire.start(rank, Tag.PART, (0,), EMPTY) for _ in range(chunks)]
        for each in begun:
            wire.finish(each)
