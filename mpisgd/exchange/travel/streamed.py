"""Push and pull in chunks, both ways at once, for protocols where weights wait for gradients.

                 learner                                    shard
    pull         posts ANSWER and its PARTs; PULL      ->   keeps the request
    push         PUSH headers; PARTs, a few at once    ->   posts receives for the first PARTs (`vectors/body.py`)
                 of all slices, in one order; COMPUTED      after all wanted headers, chunk by chunk:
                 <- ANSWER header, PARTs when made          receives, sums, updates, sends, posts the next

Both begin during the backward pass, once a chunk's gradient is known (`stages.leaves_early`); weights then arrive apart. The bits
are those of `whole`. Rounded weights leave whole (`deltas.py`). For an unwanted gradient, and before a learner is told to
stop, the shard posts all receives, and waits for none. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import STILL_NBYTES, Buffer, Communicator, Pattern
from mpisgd.comm.messages import Goodbye, Message, Push, PushFields, Refused, Tag
from mpisgd.exchange.exchange import Answers, Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.rounds import DUPLEX
from mpisgd.exchange.shard_channel import EMPTY, ShardChannel
from mpisgd.rules.portions import NO_PORTION
from mpisgd.vectors.body import WINDOW, Incoming, Stream
from mpisgd.vectors.chunks import count_of, cuts
from mpisgd.vectors.memory import copy_into
from mpisgd.vectors.skipped import NOTHING, Runs, within


class _Outgoing:
    """A slice's chunks on their way out; `final`, `sent`: numbers of known chunks, and of begun."""

    def __init__(self, wire: Communicator, rank: int, gradient: Any, pieces: list[slice]) -> None:
        self._start = wire.start
        self._rank = rank
        self._gradient = gradient
        self.pieces = pieces
        self.under_way = deque[Any]()
        self.begin()

    def begin(self) -> None:
        """Begin a gradient."""
        self.final = self.sent = 0
        self._skipped: dict[int, Runs] = {}

    @property
    def share(self) -> float:
        """Sent share of the gradient, with the next chunk."""
        return (self.sent + 1) / len(self.pieces)

    @property
    def waits(self) -> bool:
        return self.sent < self.final

    def note_final(self, number: int, skipped: Runs) -> None:
        """Note a chunk as known, with the slice's elements without a gradient."""
        piece = self.pieces[number]
        self._skipped[number] = within(skipped, piece.start, piece.stop) + piece.start
        while self.final in self._skipped:
            self.final += 1

    def send(self) -> None:
        """Begin the next chunk; behind it, its runs without a gradient."""
        skipped, part = self._skipped[self.sent], self._gradient[self.pieces[self.sent]]
        self.sent += 1
        self.under_way.append(self._start(self._rank, Tag.PART, (len(skipped), part.nbytes), part))
        for run in skipped.tolist():
            self.under_way.append(self._start(self._rank, Tag.SKIPPED, tuple(run)))

    def has_room(self) -> bool:
        while self.under_way and self.under_way[0].has_left():
            self.under_way.popleft()
        return len(self.under_way) < WINDOW


class _Trial:
    """Trial of early chunks: rounds with and without are timed in turn, then the faster way stays."""

    # Early chunks cost a thread, and a copy of the weights: over fast links, without cores to spare, more than they hide. 44 MB,
    # two nodes, early over late: at 10 Gbit/s 0.85 where ranks share cores, 1.09 where they wait; at 1 Gbit/s 1.0 and 1.33.

    def __init__(self) -> None:
        self.early = True
        self._rounds = 0
        self._ns: dict[bool, list[int]] = {True: [], False: []}

    def end_round(self, ns: int) -> None:
        if self._rounds == _UNTIMED + _TIMED:
            return
        if self._rounds >= _UNTIMED:
            self._ns[self.early].append(ns)
            self.early = not self.early
        self._rounds += 1
        if self._rounds == _UNTIMED + _TIMED:
            self.early = statistics.median(self._ns[True]) <= statistics.median(self._ns[False])


_UNTIMED = 2
"""First rounds: the first pull, and the first mini-batch, which leaves late."""
_TIMED = 8


class StreamedChannel(LearnerChannel):
    """A learner's end; `next_clock`: of the pull after a push, by the clock of its weights."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        slices: Slices,
        *,
        consistent: bool,
        next_clock: Callable[[int], int],
        chunks: int,
    ) -> None:
        super().__init__(wire, roles, learner_id, slices, consistent=consistent, when=DUPLEX)
        count = count_of(slices.bounds, chunks)
        pieces = [list(cuts(nbytes, count)) for nbytes in self._weights_nbytes]
        self._outgoing = [_Outgoing(wire, *each) for each in zip(self._ranks, self._gradients, pieces, strict=True)]
        self._places = [(shard, number) for shard, own in enumerate(pieces) for number in reversed(range(len(own)))]
        """Slice and place of each of `chunks.parts_of`."""
        whole = [slices.weights[start:end] for start, end in slices.bounds]
        self._rooms = [[room[piece] for piece in each] for room, each in zip(whole, pieces, strict=True)]
        arrived, self._copied = self._copied, []
        self._into = [[into[piece] for piece in each] for (into, _), each in zip(arrived, pieces, strict=False)]
        """Memory to compute from, where weights that come early arrive apart."""
        self._trial = _Trial()
        # all slices are complete at once, large or small
        self._order = sorted(self._places, key=lambda place: ((place[1] + 1) / len(pieces[place[0]]), place[0]))
        self._next_clock = next_clock
        self._paced = slices.gradients.nbytes > STILL_NBYTES and wire.clock.calls
        """Chunks wait while others leave; else nothing sends them during computing."""
        self._asked: list[Any] | None = None
        """Pending answers, of a push begun by `leave`."""
        self._headers: list[Any] = []
        self._sent: list[Any] = []
        """Transfers of the begun push: its headers, and all else."""
        self._pulled_ns = 0

    @property
    def early(self) -> bool:
        return self._trial.early

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        """Push a chunk of `chunks.parts_of`; the first begins the push, and asks for the next weights."""
        clock = self._wire.clock
        clock.hold()
        start_ns = self.now_ns()
        if self._asked is None:
            report = Report(seq, samples, loss, start_ns - self._pulled_ns, 0, rounded=rounded, scale=scale)
            self._asked = self._ask_for(self._shards, self._next_clock(min(self._clocks)), self._rooms)
            self._begin([self._told(each, report) for each in self._shards])
        shard, number = self._places[shard]
        self._outgoing[shard].note_final(number, within(skipped, *self._bounds[shard]))
        self._send_waiting()
        self.exchanging_ns += self.now_ns() - start_ns
        if self._paced:
            clock.let_move(self._send_waiting)

    def _told(self, shard: int, report: Report, runs: Runs = NOTHING) -> PushFields:
        return super()._told(shard, report)

    def _begin(self, told: list[PushFields]) -> None:
        self._headers = [self._wire.start(rank, Tag.PUSH, fields) for rank, fields in zip(self._ranks, told, strict=True)]

    def _send_waiting(self) -> None:
        """Begin chunks, of no slice many more than of another; wait for none."""
        while waiting := sorted((each for each in self._outgoing if each.waits), key=lambda each: each.share):
            most = waiting[0].share + WINDOW / len(waiting[0].pieces)
            has_room = next((each for each in waiting if not self._paced or (each.share < most and each.has_room())), None)
            if has_room is None:
                return
            has_room.send()

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Note the gradient; of a push begun, send all: shards wait for nothing else."""
        self._wire.clock.hold()
        start_ns = self.now_ns()
        super().push(report, meanwhile)
        self._computed_ns = report.compute_ns
        if self._headers:
            self._sent = self._send_all()
        self.exchanging_ns += self.now_ns() - start_ns

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Pull, and push what is left; call `meanwhile` once the gradient has left."""
        if self._wire.signal > 0:
            self._tell_of_signal()

        def left() -> None:
            if self._noted:
                self._see_out_push()
            if meanwhile is not None:
                meanwhile()

        answers = self._pull_all(min_clock, left)
        now_ns = self.now_ns()
        self._trial.end_round(now_ns - self._pulled_ns)
        self.push_ns, self.exchanging_ns, self._pulled_ns = self.exchanging_ns, 0, now_ns
        return answers

    def _see_out_push(self) -> None:
        if not self._headers:
            self._begin([told for told, _ in self._noted])
            self._sent = self._send_all()
        for transfer in (*self._headers, *self._sent):
            self._wire.finish(transfer)
        self._headers, self._noted = [], []
        self._pushes += 1

    def _send_all(self) -> list[Any]:
        for outgoing, (_, runs) in zip(self._outgoing, self._noted, strict=True):
            for number in range(outgoing.final, len(outgoing.pieces)):
                outgoing.note_final(number, runs)
        while waiting := [each for each in self._outgoing if each.waits]:
            least = min(waiting, key=lambda each: each.share)
            while not least.has_room():
                self._wire.finish(least.under_way.popleft())
            least.send()
        sent = [self._wire.start(rank, Tag.COMPUTED, (self._computed_ns,)) for rank in self._ranks]
        for outgoing in self._outgoing:
            sent += outgoing.under_way
            outgoing.under_way.clear()
            outgoing.begin()
        return sent

    def _ask(self, shards: list[int], min_clock: int) -> list[Any]:
        asked, self._asked = self._asked, None
        if asked is not None:
            return asked
        if self._held is not None:
            return super()._ask(shards, min_clock)
        return self._ask_for(shards, min_clock, self._into or self._rooms)

    def _ask_for(self, shards: list[int], min_clock: int, rooms: list[list[Any]]) -> list[Any]:
        wire, question = self._wire, (self._learner_id, min_clock)
        self._apart = bool(self._into) and rooms is self._rooms
        asked = []
        for shard in shards:
            rank = self._ranks[shard]
            parts = deque(wire.post(rank, Tag.PART, room) for room in rooms[shard])
            asked.append((wire.ask(rank, Tag.PULL, question, Tag.ANSWER), parts))
        return asked

    def _take_answers(self, shards: list[int], asked: list[Any], min_clock: int) -> tuple[int, int]:
        if self._held is not None:
            return super()._take_answers(shards, asked, min_clock)
        stop, began_ns = super()._take_answers(shards, [answer for answer, _ in asked], min_clock)
        parts = dict(zip(shards, (parts for _, parts in asked), strict=True))
        for shard, number in self._order:
            if shard in parts:
                part = parts[shard].popleft()
                self._wire.header(part)
                self._wire.finish(part)
                if self._apart and not stop:
                    copy_into(self._into[shard][number], self._rooms[shard][number])
        return stop, began_ns


#: Tags taken on arrival; parts are received in their turn.
_HEADERS = tuple((None, tag) for tag in (Tag.PULL, Tag.PUSH, Tag.GOODBYE, Tag.SNAPSHOT_PULL, Tag.INTERRUPT))


class _Parts(Stream):
    def __init__(self, wire: Communicator, rank: int, push: Push) -> None:
        self._wire = wire
        self._rank = rank
        self._push = push
        self._posted = deque[Any]()
        self._computed = wire.post(rank, Tag.COMPUTED)

    def post(self, room: Any) -> None:
        self._posted.append(self._wire.post(self._rank, Tag.PART, room))

    def wait(self) -> Runs:
        part = self._posted.popleft()
        skipped, _ = self._wire.header(part)
        self._wire.finish(part)
        return np.array([self._receive(Tag.SKIPPED) for _ in range(skipped)], np.int64) if skipped else NOTHING

    def end(self) -> None:
        push, (compute_ns,) = self._push, self._wire.header(self._computed)
        self._wire.finish(self._computed)
        push.backward_ns, push.compute_ns = max(0, compute_ns - push.compute_ns), compute_ns

    def _receive(self, tag: int) -> tuple[Any, ...]:
        posted = self._wire.post(self._rank, tag)
        fields = self._wire.header(posted)
        self._wire.finish(posted)
        return fields


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
        """Take the header alone. Raises PeerError: skipped elements, which chunks tell of."""
        if push.skipped:
            raise PeerError(f"push of learner {push.learner_id}: {push.skipped} runs skipped, expected none beside chunks")
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
            message.backward_ns = 0
            parts = _Parts(self._wire, self.rank_of(message.learner_id), message)
            message.body = self._incoming[message.learner_id] = bodies.begin(parts)
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
            self._under_way += [start(rank, Tag.PART, (0, chunk.nbytes), chunk) for chunk in self._chunks]

    def add_chunk(self, chunk: Buffer) -> None:
        self._chunks.append(chunk)
        self._under_way += [self._wire.start(rank, Tag.PART, (0, chunk.nbytes), chunk) for rank in self._opened]

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
        begun += [wire.start(rank, Tag.PART, (0, 0), EMPTY) for _ in range(chunks)]
        for each in begun:
            wire.finish(each)
