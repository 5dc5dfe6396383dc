"""The shard's end of push and pull (`learner_channel.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm import pieces
from mpisgd.comm.communicator import Buffer, Communicator, IncomingBodies, OpenMessage, Pattern, is_far
from mpisgd.comm.messages import (
    NOTHING_MORE,
    Ending,
    Fields,
    FromLearner,
    GaveUp,
    Goodbye,
    Interrupt,
    Lost,
    Message,
    Pull,
    Push,
    Refused,
    SnapshotPull,
    Stuck,
    Tag,
    Torn,
)
from mpisgd.comm.signals import HEARD, name_of
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.survivors import Survivors
from mpisgd.exchange.travel.gathering import Gathering
from mpisgd.rules.portions import NO_PORTION
from mpisgd.vectors.body import Pool
from mpisgd.vectors.chunks import chunks_of

EMPTY: np.ndarray = np.zeros(0, np.float32)
_NO_PUSH = Pool(EMPTY)
_PULLS = ((None, Tag.PULL),)
_ANYBODY = ((None, Tag.PULL), (None, None))
# Plain integers for every gradient: a look into the enumeration costs time.
_PUSH: int = Tag.PUSH
_PULL: int = Tag.PULL
_ANSWER: int = Tag.ANSWER
_GOES_ON: int = Ending.NONE
_TO_SHARDS = "PUSH, PULL, GOODBYE, GAVE_UP, INTERRUPT or SNAPSHOT_PULL"


class Numbers:
    """Numbers told with weights: snapshots up to the next answers' clock, portions dealt."""

    def __init__(self) -> None:
        self.snapshots = 0
        self.portion_of: Callable[[int], int] | None = None

    def note_snapshots(self, count: int) -> None:
        self.snapshots = count

    def deal(self, portion_of: Callable[[int], int]) -> None:
        self.portion_of = portion_of


class ShardChannel:
    """A shard's end: receives all messages, answers pulls allowed by the protocol.

    Args:
        duplex: answers may leave during the next receive, until the weights change (`rounds.py`).
        gathered: gradients are received at once (`gathering.py`), not in turn.
        in_pieces: bodies of other nodes come in pieces (`comm/pieces.py`).
        cut: weights like those that leave in pieces; None: whole.
        survivors: other ranks of a fault-tolerant job.
    """

    rounds_in_chunks = False
    """Rounded weights leave while being made; all learners must hold the same."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        shard: int,
        *,
        duplex: bool = False,
        gathered: bool = False,
        in_pieces: bool = False,
        cut: Buffer | None = None,
        survivors: Survivors | None = None,
    ) -> None:
        self._wire = wire
        self._now_ns = wire.clock.now_ns
        self.duplex = duplex or gathered
        self._in_pieces = in_pieces
        self._pieces_count = 0 if cut is None else len(pieces.bodies(chunks_of(cut)))
        """Pieces of an answer to another node; 0: uncut."""
        self._gathering = Gathering(wire) if gathered else None
        self._learner_ranks = list(roles.learner_ranks)
        self._first_evaluator = roles.evaluator_rank
        self._survivors = survivors
        size = 1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank)
        self._learner_of_rank = [-1] * (size if survivors is None else survivors.size)
        for learner_id, rank in enumerate(roles.learner_ranks):
            self._learner_of_rank[rank] = learner_id
        self._team_sizes = [len(team) for team in roles.teams]
        self._shard = shard
        self._under_way: list[Any] = []
        self._opened: list[Any] = []
        self._chunks: list[Buffer] = []
        self._notices = [0] * len(roles.learner_ranks)
        self._anybody: tuple[Pattern, ...] = _ANYBODY
        self._coming: list[IncomingBodies] = [] if self._gathering is None else self._gathering.coming
        self._last_ending = Ending.INTERRUPTED if survivors is None else survivors.last_ending
        """Highest valid ending of a goodbye."""
        self._said: dict[tuple[int | None, int], Callable[..., Message]] = {(None, Tag.GAVE_UP): GaveUp}
        """Messages by sender, None = any learner, and tag."""
        self.numbers = Numbers()

    def take_also(self, said: dict[int, Callable[..., Message]], rank: int | None = None) -> None:
        """Take further messages, by tag: of learners, or of another rank."""
        self._said |= {(rank, tag): message for tag, message in said.items()}

    @property
    def _evaluator_rank(self) -> int:
        return self._first_evaluator if self._survivors is None else self._survivors.evaluator_rank

    def rank_of(self, learner_id: int) -> int:
        return self._learner_ranks[learner_id]

    def learner_of(self, rank: int) -> int:
        return self._learner_of_rank[rank] if 0 <= rank < len(self._learner_of_rank) else -1

    def now_s(self) -> float:
        return self._now_ns() * 1e-9

    def receive(
        self,
        bodies: Pool,
        learner_id: int | None = None,
        until_s: float = math.inf,
        patterns: tuple[Pattern, ...] | None = None,
    ) -> Message | None:
        """Wait for the next message, of a learner or of any rank; a push's slice goes into a body of these.

        Take pulls before pushes, and from any rank: a learner waiting for weights computes nothing.

        Args:
            learner_id: required sender of a push or goodbye, or None.
            until_s: second at which None is returned.
            patterns: messages to take, overriding `learner_id`.

        An impossible message is received apart, and Refused returned. Raises PeerError: a vital rank is lost (`tolerant.py`).
        """
        if self._gathering is None:
            return self._take(bodies, learner_id, until_s, patterns)
        take = partial(self._take, bodies, learner_id, until_s, patterns)
        return self._gathering.receive(take, self._whose, until_s)

    def _take(self, bodies: Pool, learner_id: int | None, until_s: float, patterns: tuple[Pattern, ...] | None) -> Message | None:
        wire, push = self._wire, None
        if patterns is None:
            patterns = self._anybody if learner_id is None else self._only(learner_id)
        try:
            taken = wire.take(patterns, None if until_s == inf else math.ceil(until_s * 1e9), self._coming)
            if taken is None:
                return None
            source, tag, fields = taken
            sender = fields[0]
            if self._learner_of_rank[source] != sender or sender < 0:
                return self._news(source, tag, fields)
            if tag == _PULL:
                return Pull(sender, fields[1])
            if tag != _PUSH:
                return self._seldom(source, tag, fields)
            push = Push(fields, self._now_ns())
            self._check(push, source, bodies.nbytes)
            return push if self._take_body(push, bodies) else Torn(push)
        except PeerError as error:
            if error.rank < 0:  # the loss of a rank, no bad message
                raise
            if push is not None and push.body is not None:
                push.body.release()
            return Refused(error.rank, str(error), push=push is not None)

    def _check(self, push: Push, source: int, nbytes: int) -> None:
        if push.nbytes != nbytes:
            raise PeerError(f"push of rank {source}: a slice of {push.nbytes} bytes, expected {nbytes}", source)
        if push.gradients != self._team_sizes[push.learner_id]:
            expected = self._team_sizes[push.learner_id]
            raise PeerError(f"push of rank {source}: {push.gradients} gradients, expected {expected}", source)
        if push.skipped:
            if not 0 < push.skipped <= nbytes:
                raise PeerError(f"push of rank {source}: {push.skipped} runs skipped, expected at most {nbytes}", source)
            push.runs = np.empty((push.skipped, 2), np.int64)

    def _take_body(self, push: Push, bodies: Pool) -> bool:
        """Receive the gradient of the last header; return False where only a part came, and no more will."""
        gathering = self._gathering
        begins = gathering is not None and (bodies.has_room or gathering.is_coming(push.learner_id))
        push.body = bodies.take()
        parts = self._parts(push, push.body.memory)
        if gathering is None or not begins:
            return self._wire.take_body(*parts)
        gathering.begin(push, self.rank_of(push.learner_id), parts)
        return True

    def _parts(self, push: Push, vector: Any) -> tuple[Any, ...]:
        whole = not (self._in_pieces and is_far(self._wire, self.rank_of(push.learner_id)))
        vectors = (vector,) if whole else pieces.bodies([vector])
        return (push.runs.reshape(-1), *vectors) if push.skipped else vectors

    def _whose(self, message: Message) -> int:
        """Return the learner whose begun pushes a message stands behind; -1: none's."""
        if isinstance(message, SnapshotPull):
            return self.learner_of(self._evaluator_rank)
        return message.learner_id if isinstance(message, FromLearner) else -1

    def receive_pull(self) -> Message | None:
        message, gathering = self._take(_NO_PUSH, None, 0.0, _PULLS), self._gathering
        while message is not None and gathering is not None and gathering.put_behind(message, self._whose(message)):
            message = self._take(_NO_PUSH, None, 0.0, _PULLS)
        return message

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        """Take a message without leading learner_id: the evaluator's, a signal, or the communicator's news. Raises PeerError."""
        if (said := self._said.get((source, tag))) is not None:
            return said(*fields)
        if tag in (Tag.SNAPSHOT_PULL, Tag.INTERRUPT):
            return self._seldom(source, tag, fields)
        if tag == Tag.GIVEN_UP and self._survivors is not None and (given_up := self._survivors.given_up(source, fields)):
            return given_up
        if tag == Tag.LOST:
            return Lost(source, self._learner_of_rank[source])
        if tag == Tag.STUCK:
            return Stuck(source, self._learner_of_rank[source])
        raise PeerError(f"rank {source} poses as learner {fields[0]}", source)

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        sender: int = fields[0]
        if tag == Tag.GOODBYE:
            _, pushed, ending = fields
            if not 0 <= ending <= self._last_ending:
                raise PeerError(f"rank {source} says goodbye with ending {ending}: expected 0 ... {self._last_ending:d}", source)
            return Goodbye(sender, pushed, ending)
        if (said := self._said.get((None, tag))) is not None:
            return said(*fields)
        if tag == Tag.SNAPSHOT_PULL:
            lost = self._survivors is not None and self._survivors.has_lost(source)
            return Lost(source, -1) if lost else self._pull_of(source, *fields)
        if tag == Tag.INTERRUPT:
            if sender not in HEARD:
                raise PeerError(f"rank {source} tells of signal {sender}: expected one of {', '.join(map(name_of, HEARD))}", source)
            return Interrupt(sender)
        raise PeerError(f"rank {source} sent {Tag(tag).name} to a shard: expected {_TO_SHARDS}", source)

    def _pull_of(self, source: int, number: int, enough: int) -> SnapshotPull:
        if number < NOTHING_MORE:
            raise PeerError(f"rank {source} pulled snapshot {number}: expected {NOTHING_MORE} or more", source)
        if enough < 0:
            raise PeerError(f"rank {source} has seen enough at snapshot {enough - 1}: expected 0 or more", source)
        if self._survivors is not None:
            self._survivors.check_evaluates(source, number)
        elif source != self._evaluator_rank:
            raise PeerError(f"rank {source} pulled a snapshot: only rank {self._evaluator_rank} may", source)
        return SnapshotPull(number, enough)

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        if self._survivors is not None:
            return (self._learner_ranks[learner_id], None), *self._survivors.patterns()
        evaluator = (self._evaluator_rank, Tag.SNAPSHOT_PULL)
        return (self._learner_ranks[learner_id], None), (None, Tag.PULL), evaluator, (None, Tag.INTERRUPT)

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """Begin to send weights, not to be changed until `finish_answers`."""
        wire, nbytes = self._wire, weights.nbytes
        far: list[int] = []  # list[int]() would cost as much as an answer's header
        if self._pieces_count:
            far = [each for each in learner_ids if self._is_cut(self.rank_of(each))]
            learner_ids = [each for each in learner_ids if each not in far]
        body = wire.aside(weights) if learner_ids else weights
        for learner_id in learner_ids:
            fields = self._answer(learner_id, clock, verdicts, nbytes)
            self._under_way.append(wire.start(self._learner_ranks[learner_id], _ANSWER, fields, body))
        if far:
            self.open_answers(far, weights, clock, verdicts)
            self.add_chunk(weights)
            self.close_answers()

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """Begin answers with weights still being made; a call between two chunks adds learners."""
        for learner_id in learner_ids:
            fields = self._answer(learner_id, clock, verdicts, weights.nbytes)
            opened = self._open(self._learner_ranks[learner_id], fields)
            for chunk in self._chunks:
                opened.add(chunk)
            self._opened.append(opened)

    def _open(self, rank: int, fields: Fields) -> OpenMessage:
        opened: OpenMessage = self._wire.open(rank, _ANSWER, fields)
        return pieces.InPieces(opened) if self._is_cut(rank) else opened

    def _is_cut(self, rank: int) -> bool:
        return self._pieces_count > 0 and is_far(self._wire, rank)

    def _answer(self, learner_id: int, clock: int, verdicts: dict[int, int], nbytes: int) -> Fields:
        told = self.numbers
        return (
            self._shard,
            clock,
            _GOES_ON,
            verdicts.get(learner_id, 0),
            self._notices[learner_id],
            NO_PORTION if told.portion_of is None else told.portion_of(learner_id),
            told.snapshots,
            nbytes,
        )

    def add_chunk(self, chunk: Buffer) -> None:
        self._chunks.append(chunk)
        for opened in self._opened:
            opened.add(chunk)

    def close_answers(self) -> None:
        self._under_way += [opened.close() for opened in self._opened]
        self._opened.clear()
        self._chunks.clear()

    def finish_answers(self, *, last: bool = False) -> bool:
        """Wait until the answers have left; return False after giving up any: the weights must never change.

        Gathering waits only for the `last` answers: else False means that some go on, from weights not to be changed.
        """
        if self._gathering is not None and not last:
            under_way, self._under_way = self._under_way, []
            return self._gathering.set_aside(under_way)
        if self._gathering is not None:
            self._gathering.see_out()
        all_left = True
        for answer in self._under_way:
            if not self._wire.finish(answer):
                all_left = False
        self._under_way.clear()
        return all_left

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        """Answer a pull with an ending; empty chunks end the posted receives."""
        wire, rank = self._wire, self._learner_ranks[learner_id]
        fields = self._shard, clock, ending, 0, self._notices[learner_id], NO_PORTION, 0, 0
        wire.finish(wire.start(rank, Tag.ANSWER, fields, *[EMPTY] * (self._pieces_count if self._is_cut(rank) else chunks)))

    def tell(self, ranks: Iterable[int], tag: int, *words: float) -> None:
        """Send ranks this shard's number and `words`: their receives are posted (law 1)."""
        wire, fields = self._wire, (self._shard, *words)
        under_way = [wire.start(rank, tag, fields) for rank in ranks]
        for told in under_way:
            wire.finish(told)

    def notify(self, learner_ids: list[int], clock: int) -> None:
        """Tell learners of a reached clock, at most once per answer."""
        for learner_id in learner_ids:
            self._notices[learner_id] += 1
        self.tell(map(self.rank_of, learner_ids), Tag.NOTICE, clock)

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        """Send a snapshot: theta, and thetabar where weights are averaged; empty vectors = no snapshot."""
        wire, nbytes = self._wire, vectors[0].nbytes
        fields = (self._shard, nbytes > 0, clock, samples, int(taken_s * 1e9), nbytes)
        wire.finish(wire.start(self._evaluator_rank, Tag.SNAPSHOT_ANSWER, fields, *vectors))
