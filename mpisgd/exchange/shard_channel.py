"""The shard's end of push and pull: receives whatever comes, answers the pulls that the protocol allows (`channel.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Coming, Communicator, Opened, Pattern
from mpisgd.comm.messages import (
    NOTHING_MORE,
    Ending,
    Fields,
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
from mpisgd.rules.portions import NO_PORTION

EMPTY: np.ndarray = np.zeros(0, np.float32)
_PULLS = ((None, Tag.PULL),)
_ANYBODY = ((None, Tag.PULL), (None, None))
# What every gradient needs, without a look into the enumeration:
_PUSH: int = Tag.PUSH
_PULL: int = Tag.PULL
_ANSWER: int = Tag.ANSWER
_GOES_ON: int = Ending.NONE
_TO_SHARDS = "PUSH, PULL, GOODBYE, GAVE_UP, INTERRUPT or SNAPSHOT_PULL"


class ShardChannel:
    """A shard's end: receives whatever comes, answers the pulls that the protocol allows.

    `duplex`: answers may leave while the next gradient comes in, until the weights change (`both_ways/`).
    """

    rounds_in_chunks = False
    """Whether weights that are rounded leave while they are made; everybody must hold the same."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, *, duplex: bool = False) -> None:
        self._wire = wire
        self._now_ns = wire.clock.now_ns
        self.duplex = duplex
        self._learner_ranks = list(roles.learner_ranks)
        self._evaluator_rank = roles.evaluator_rank
        self._learner_of_rank = [-1] * (1 + max(*roles.shard_ranks, *roles.computing_ranks, roles.evaluator_rank))
        for learner_id, rank in enumerate(roles.learner_ranks):
            self._learner_of_rank[rank] = learner_id
        self._team_sizes = [len(team) for team in roles.teams]
        self._shard = shard
        self._under_way: list[Any] = []
        self._opened: list[Any] = []
        self._chunks: list[Buffer] = []
        self._notices = [0] * len(roles.learner_ranks)
        self._anybody: tuple[Pattern, ...] = _ANYBODY
        self._coming: list[Coming] = []
        """Gradients that are received while other messages are taken (`gathering.py`)."""
        self.last_ending = Ending.INTERRUPTED
        """A goodbye says why with one up to this."""
        self.chunks_count = 1
        """In how many chunks this shard's slice is sent."""
        self.said: dict[int, Callable[..., Message]] = {Tag.GAVE_UP: GaveUp}
        """What learners may say now and then, that nothing else need be known of here."""
        self.snapshots = 0
        """How many there are of the clock of the next answers, or older: they say so."""
        self.portion_of: Callable[[int], int] | None = None
        """Which portion a learner is to compute from the weights that it is given; None: it draws by itself."""

    def rank_of(self, learner_id: int) -> int:
        return self._learner_ranks[learner_id]

    def learner_of(self, rank: int) -> int:
        """The learner_id of a rank; -1 = it is none."""
        return self._learner_of_rank[rank] if 0 <= rank < len(self._learner_of_rank) else -1

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._now_ns() * 1e-9

    def receive(
        self,
        gradient: Buffer,
        learner_id: int | None = None,
        until_s: float = math.inf,
        patterns: tuple[Pattern, ...] | None = None,
    ) -> Message | None:
        """Wait for the next message, of one learner or of anybody; a push's slice goes into `gradient`.

        Pulls go before pushes: a learner that waits for weights computes nothing; and where pulls wait behind a queue of pushes,
        all who queue are given the same weights, and then compute, push and queue in step.

        Pulls are taken from anybody at any time: a learner whose turn to push has not come must be given weights to compute.

        Args:
            gradient: (slice,), C-contiguous, of the type that gradients travel in.
            learner_id: whose push or goodbye it must be, or None.
            until_s: None is returned where nothing has come by this second.
            patterns: what to take, whatever `learner_id` says.

        A message that cannot be (wrong tag, magic, sender, size or number of gradients) is received into memory of its own, and
        Refused is returned. Raises PeerError where a rank is lost without which there is no job (`tolerant.py`).
        """
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
            self._check(push, source, gradient.nbytes)
            return push if self._take_body(push, gradient) else Torn(push)
        except PeerError as error:
            if error.rank < 0:  # not what a rank sent, but what has become of one
                raise
            return Refused(error.rank, str(error), push=push is not None)

    def _check(self, push: Push, source: int, nbytes: int) -> None:
        """Make room for the runs that a push says it skips. Raises PeerError where it cannot be."""
        if push.nbytes != nbytes:
            raise PeerError(f"push of rank {source}: a slice of {push.nbytes} bytes, expected {nbytes}", source)
        if push.gradients != self._team_sizes[push.learner_id]:
            expected = self._team_sizes[push.learner_id]
            raise PeerError(f"push of rank {source}: {push.gradients} gradients, expected {expected}", source)
        if push.skipped:
            if not 0 < push.skipped <= nbytes:
                raise PeerError(f"push of rank {source}: {push.skipped} runs skipped, expected at most {nbytes}", source)
            push.runs = np.empty((push.skipped, 2), np.int64)

    def _take_body(self, push: Push, gradient: Any) -> bool:
        """Receive the gradient of a push whose header was taken last; False: a part has come, and no more will."""
        return self._wire.take_body(*self._bodies(push, gradient))

    def _bodies(self, push: Push, vector: Any) -> tuple[Any, ...]:
        """What a push travels in: its runs, if it skips any, and the gradient."""
        return (push.runs.reshape(-1), vector) if push.skipped else (vector,)

    def receive_pull(self) -> Message | None:
        """A pull that has come; None where none has."""
        return ShardChannel.receive(self, EMPTY, until_s=0.0, patterns=_PULLS)

    def _news(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what need not begin with a learner_id: of the evaluator, a signal, or what the communicator says of a rank,
        as if that had sent it. Raises PeerError where the rank itself has."""
        if tag in (Tag.SNAPSHOT_PULL, Tag.INTERRUPT):
            return self._seldom(source, tag, fields)
        if tag == Tag.LOST:
            return Lost(source, self._learner_of_rank[source])
        if tag == Tag.STUCK:
            return Stuck(source, self._learner_of_rank[source])
        raise PeerError(f"rank {source} says it is learner {fields[0]}: it is not", source)

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what comes once in a run, or now and then. Raises PeerError."""
        sender: int = fields[0]
        if tag == Tag.GOODBYE:
            _, pushed, ending = fields
            if not 0 <= ending <= self.last_ending:
                raise PeerError(f"rank {source} says goodbye with ending {ending}: expected 0 ... {self.last_ending:d}", source)
            return Goodbye(sender, pushed, ending)
        if (said := self.said.get(tag)) is not None:
            return said(*fields)
        if tag == Tag.SNAPSHOT_PULL:
            return self._pull_of(source, *fields)
        if tag == Tag.INTERRUPT:
            if sender not in HEARD:
                raise PeerError(f"rank {source} tells of signal {sender}: expected one of {', '.join(map(name_of, HEARD))}", source)
            return Interrupt(sender)
        raise PeerError(f"rank {source} sent {Tag(tag).name} to a shard: expected {_TO_SHARDS}", source)

    def _pull_of(self, source: int, number: int, enough: int) -> SnapshotPull:
        """What the evaluator asks for. Raises PeerError."""
        if number < NOTHING_MORE:
            raise PeerError(f"rank {source} pulled snapshot {number}: expected {NOTHING_MORE} or more", source)
        if enough < 0:
            raise PeerError(f"rank {source} has seen enough at snapshot {enough - 1}: expected 0 or more", source)
        self._check_evaluates(source, number)
        return SnapshotPull(number, enough)

    def _check_evaluates(self, source: int, number: int) -> None:
        """Raises PeerError where a rank that does not evaluate has pulled a snapshot."""
        if source != self._evaluator_rank:
            raise PeerError(f"rank {source} pulled a snapshot: only rank {self._evaluator_rank} may", source)

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        evaluator = (self._evaluator_rank, Tag.SNAPSHOT_PULL)
        return (self._learner_ranks[learner_id], None), (None, Tag.PULL), evaluator, (None, Tag.INTERRUPT)

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """Begin to send weights to learners whose pulls may be answered; `weights` must stay until `finish_answers`."""
        wire, nbytes = self._wire, weights.nbytes
        body = wire.aside(weights)
        for learner_id in learner_ids:
            fields = self._answer(learner_id, clock, verdicts, nbytes)
            self._under_way.append(wire.start(self._learner_ranks[learner_id], _ANSWER, fields, body))

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """Begin answers whose weights are still being made: chunk by chunk (`add_chunk`), until all are (`close_answers`).

        May be called again between two chunks: those learners are sent all chunks, too.
        """
        for learner_id in learner_ids:
            fields = self._answer(learner_id, clock, verdicts, weights.nbytes)
            opened = self._open(self._learner_ranks[learner_id], fields)
            for chunk in self._chunks:
                opened.add(chunk)
            self._opened.append(opened)

    def _open(self, rank: int, fields: Fields) -> Opened:
        return self._wire.open(rank, _ANSWER, fields)

    def _empty_count(self, rank: int) -> int:
        """How many receives this rank has posted for an answer."""
        return self.chunks_count

    def _answer(self, learner_id: int, clock: int, verdicts: dict[int, int], nbytes: int) -> Fields:
        portion = NO_PORTION if self.portion_of is None else self.portion_of(learner_id)
        return (
            self._shard,
            clock,
            _GOES_ON,
            verdicts.get(learner_id, 0),
            self._notices[learner_id],
            portion,
            self.snapshots,
            nbytes,
        )

    def add_chunk(self, chunk: Buffer) -> None:
        """The next chunk of the weights is made."""
        self._chunks.append(chunk)
        for opened in self._opened:
            opened.add(chunk)

    def close_answers(self) -> None:
        """All chunks are made."""
        self._under_way += [opened.close() for opened in self._opened]
        self._opened.clear()
        self._chunks.clear()

    def finish_answers(self) -> bool:
        """Wait until the answers have left; False where one was given up, and its weights must stay as they are for ever."""
        all_left = True
        for answer in self._under_way:
            if not self._wire.finish(answer):
                all_left = False
        self._under_way.clear()
        return all_left

    def see_out_answers(self) -> bool:
        """At the end: wait until all have left; False as above."""
        return self.finish_answers()

    def stop(self, learner_id: int, clock: int, ending: int) -> None:
        """Answer a pull: there are no more weights, and why. Empty chunks end the receives that were posted."""
        wire, rank = self._wire, self._learner_ranks[learner_id]
        fields = self._shard, clock, ending, 0, self._notices[learner_id], NO_PORTION, 0, 0
        wire.finish(wire.start(rank, Tag.ANSWER, fields, *[EMPTY] * self._empty_count(rank)))

    def answer_norm(self, learner_ids: Iterable[int], ending: int, norm: float) -> None:
        """Answer those who have asked for the norm of this shard's slice; `ending`: there is none, and why."""
        wire, fields = self._wire, (self._shard, ending, norm)
        under_way = [wire.start(self._learner_ranks[learner_id], Tag.NORM_ANSWER, fields) for learner_id in learner_ids]
        for answer in under_way:
            wire.finish(answer)

    def notify(self, learner_ids: list[int], clock: int) -> None:
        """Tell learners that `clock` is reached. At most once for each answer: so their receives are posted (law 1)."""
        wire = self._wire
        under_way = []
        for learner_id in learner_ids:
            self._notices[learner_id] += 1
            under_way.append(wire.start(self._learner_ranks[learner_id], Tag.NOTICE, (self._shard, clock)))
        for notice in under_way:
            wire.finish(notice)

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        """Send a snapshot: theta and, where weights are averaged, thetabar; empty vectors = there is no such snapshot."""
        wire, nbytes = self._wire, vectors[0].nbytes
        fields = (self._shard, nbytes > 0, clock, samples, int(taken_s * 1e9), nbytes)
        wire.finish(wire.start(self._evaluator_rank, Tag.SNAPSHOT_ANSWER, fields, *vectors))
