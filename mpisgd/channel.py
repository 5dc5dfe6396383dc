"""Push, pull and stop over a communicator: tags, headers, buffers, and who may block on whom (DESIGN 4, law 1).

                 learner                                    shard
    push         PUSH header, GRADIENT slice          ->    takes it when its turn comes
    pull         posts ANSWER, WEIGHTS; PULL header   ->    keeps the request until the protocol allows an answer
                 <- ANSWER header, WEIGHTS slice            or ANSWER with `stop`: no weights follow
    goodbye      GOODBYE header                       ->    forgets the learner; drained when all have said it

No deadlock by construction. A learner pushes to all shards at once, in no order that could cross another's, and has finished
before it pulls. A shard never waits for one particular learner to *receive*: it sends only answers, whose receives the learner
posted before it asked. So a shard always gets back to its probe, and every send of a learner ends. The evaluator pulls
snapshots in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpisgd.communicator import Communicator, Pattern
from mpisgd.errors import PeerError
from mpisgd.messages import NOTHING_MORE, Goodbye, Message, Pull, Push, SnapshotPull, Tag
from mpisgd.protocols.verdict import Kind
from mpisgd.roles import Roles

_EMPTY = np.zeros(0, np.float32)
_ANYBODY: tuple[Pattern, ...] = ((None, Tag.PULL), (None, None))
# What a cycle of one gradient needs, without a look into the enumeration or a constructor with a dozen arguments:
_PUSH, _PULL, _ANSWER = Tag.PUSH, Tag.PULL, Tag.ANSWER
_REJECT = Kind.REJECT
_new: Any = tuple.__new__


# --------------------------------------------------------------------------------------------------------- shard's side


class ShardChannel:
    """A shard's end: receives whatever comes, answers the pulls that the protocol allows."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int) -> None:
        self._wire = wire
        self._learner_ranks = roles.learner_ranks
        self._evaluator_rank = roles.evaluator_rank
        self._learner_of_rank = {rank: learner_id for learner_id, rank in enumerate(roles.learner_ranks)}
        self._shard = shard
        self._under_way: list[Any] = []

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._wire.now_ns() * 1e-9

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        """Wait for the next message, of one learner or of anybody; a push's slice goes into `gradient`.

        Pulls go before pushes: a learner that waits for weights computes nothing; and where pulls wait behind a queue of pushes,
        all who queue are given the same weights, and then compute, push and queue in step.

        Pulls are taken from anybody at any time: a learner whose turn to push has not come must be given weights to compute.

        Args:
            gradient: (slice,) float32, C-contiguous.
            learner_id: whose push or goodbye it must be, or None.
            until_s: None is returned where nothing has come by this second.

        Raises:
            PeerError: wrong tag, magic, sender or size.
        """
        wire = self._wire
        patterns = _ANYBODY if learner_id is None else self._only(learner_id)
        taken = wire.take(patterns) if until_s == math.inf else wire.take_until(patterns, math.ceil(until_s * 1e9))
        if taken is None:
            return None
        source, tag, fields = taken
        if self._learner_of_rank.get(source) != fields[0] and tag != Tag.SNAPSHOT_PULL:
            raise PeerError(f"rank {source} says it is learner {fields[0]}: it is not")
        if tag == _PULL:
            return Pull(*fields)
        if tag == _PUSH:
            push: Push = _new(Push, (*fields, wire.now_ns()))
            if push.nbytes != gradient.nbytes:
                raise PeerError(f"push of rank {source}: a slice of {push.nbytes} bytes, expected {gradient.nbytes}")
            wire.take_body(gradient)
            return push
        if tag == Tag.GOODBYE:
            return Goodbye(*fields)
        if tag == Tag.SNAPSHOT_PULL:
            if source != self._evaluator_rank:
                raise PeerError(f"rank {source} pulled a snapshot: only rank {self._evaluator_rank} may")
            return SnapshotPull(*fields)
        raise PeerError(f"rank {source} sent {Tag(tag).name} to a shard: expected PUSH, PULL, GOODBYE or SNAPSHOT_PULL")

    def _only(self, learner_id: int) -> tuple[Pattern, ...]:
        return (self._learner_ranks[learner_id], None), (None, Tag.PULL), (self._evaluator_rank, Tag.SNAPSHOT_PULL)

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        """Begin to send weights to learners whose pulls may be answered; `weights` must stay until `finish_answers`."""
        start, nbytes = self._wire.start, weights.nbytes
        for learner_id in learner_ids:
            fields = (self._shard, clock, 0, verdicts.get(learner_id, 0), nbytes)
            self._under_way.append(start(self._learner_ranks[learner_id], _ANSWER, fields, weights))

    def finish_answers(self) -> None:
        """Wait until the answers have left."""
        self._wire.finish(*self._under_way)
        self._under_way.clear()

    def stop(self, learner_id: int, clock: int) -> None:
        """Answer a pull: there are no more weights, the run is over. An empty slice ends the receive that was posted."""
        wire = self._wire
        wire.finish(wire.start(self._learner_ranks[learner_id], Tag.ANSWER, (self._shard, clock, 1, 0, 0), _EMPTY))

    def snapshot_pull(self) -> SnapshotPull | None:
        """What the evaluator asks for, if it has; without waiting."""
        taken = self._wire.take_until(((self._evaluator_rank, Tag.SNAPSHOT_PULL),), self._wire.now_ns())
        return None if taken is None else SnapshotPull(*taken[2])

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        """Send a snapshot: theta and, where weights are averaged, thetabar; empty vectors = there is no such snapshot."""
        wire, nbytes = self._wire, vectors[0].nbytes
        fields = (self._shard, nbytes > 0, clock, samples, int(taken_s * 1e9), nbytes)
        wire.finish(wire.start(self._evaluator_rank, Tag.SNAPSHOT_ANSWER, fields, *vectors))


# ------------------------------------------------------------------------------------------------------- learner's side


class Answers(NamedTuple):
    """What the shards answered to a pull: the clock of each slice, or that the run is over."""

    clocks: tuple[int, ...]
    stop: bool
    rejected: bool
    """Whether any shard rejected the gradient pushed last: the same mini-batch is to be computed again."""
    wait_ns: int
    """From the request until the first answer began."""
    pull_ns: int
    """From there until the weights of all shards were in place."""


class LearnerChannel:
    """A learner's end: pushes slices of its gradient to all shards, pulls slices of the weights from all shards.

    Args:
        weights: (parameters,) float32 host memory that pulled slices are received into.
        gradients: (parameters,) float32 host memory that pushed slices are sent from.
        bounds: the slice of each shard, `flat.slice_bounds`.
        consistent: pull until all slices have one clock.
    """

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        *,
        weights: np.ndarray,
        gradients: np.ndarray,
        bounds: list[tuple[int, int]],
        consistent: bool,
    ) -> None:
        self._wire = wire
        self._ranks = roles.shard_ranks
        self._learner_id = learner_id
        self._weights = [weights[start:end] for start, end in bounds]
        self._gradients = [gradients[start:end] for start, end in bounds]
        self._nbytes = [part.nbytes for part in self._gradients]
        self._consistent = consistent and len(bounds) > 1
        self._shards = range(len(bounds))
        self._clocks = [-1] * len(bounds)
        self._pushes = 0
        self._rejected = False
        self.now_ns = wire.now_ns
        self.sleep = wire.sleep

    @property
    def pushed(self) -> list[int]:
        """Pushes to each shard."""
        return [self._pushes for _ in self._shards]

    def push(self, *, seq: int, samples: int, loss: float, compute_ns: int, delay_ns: int, last: Answers, push_ns: int) -> int:
        """Send the gradient to every shard, each slice with the clock of the weights it was computed from.

        `last` and `push_ns` tell how long the pull before this mini-batch, and the push before that, took. Returns
        nanoseconds.
        """
        start_ns = self.now_ns()
        start, learner_id = self._wire.start, self._learner_id
        clocks, wait_ns, pull_ns = last.clocks, last.wait_ns, last.pull_ns
        transfers = []
        for rank, clock, gradient, nbytes in zip(self._ranks, clocks, self._gradients, self._nbytes, strict=True):
            told = (learner_id, clock, seq, samples, compute_ns, delay_ns, push_ns, wait_ns, pull_ns, nbytes, loss)
            transfers.append(start(rank, _PUSH, told, gradient))
        self._pushes += 1
        self._wire.finish(*transfers)
        return self.now_ns() - start_ns

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Receive the weights of every shard, each of a clock of at least `min_clock`; call `meanwhile` once they are asked for.

        Where the protocol promises one clock over all shards, the lagging shards are asked again until all agree; a slower
        shard is never waited for by another shard (law 2).
        """
        start_ns = self.now_ns()
        shards = self._shards
        self._rejected = False
        stop, began_ns = self._ask(shards, min_clock, meanwhile)
        while self._consistent and not stop and len(set(self._clocks)) > 1:
            newest = max(self._clocks)
            lagging = [shard for shard in shards if self._clocks[shard] < newest]
            stop, _ = self._ask(lagging, newest, None)
        return Answers(tuple(self._clocks), stop, self._rejected, began_ns - start_ns, self.now_ns() - began_ns)

    def _ask(self, shards: Sequence[int], min_clock: int, meanwhile: Callable[[], None] | None) -> tuple[bool, int]:
        """Pull from some shards: ask all, the receives of their answers posted, then take the answers in that order."""
        wire, ranks = self._wire, self._ranks
        question = (self._learner_id, min_clock)
        ask, weights = wire.ask, self._weights
        asked = [ask(ranks[shard], _PULL, question, _ANSWER, weights[shard]) for shard in shards]
        if meanwhile is not None:
            meanwhile()
        stop, began_ns = False, 0
        for shard, answer in zip(shards, asked, strict=True):
            sender, clock, stopped, verdict, nbytes = wire.header(answer)
            began_ns = began_ns or self.now_ns()
            expected = 0 if stopped else self._nbytes[shard]
            if sender != shard or nbytes != expected or (clock < min_clock and not stopped):
                raise PeerError(
                    f"answer of rank {ranks[shard]}: shard {sender}, {nbytes} bytes, clock {clock};"
                    f" expected shard {shard}, {expected} bytes, clock >= {min_clock}"
                )
            wire.finish(answer)
            if stopped:
                stop = True
            else:
                self._clocks[shard] = clock
                if verdict == _REJECT:
                    self._rejected = True
        return stop, began_ns

    def goodbye(self, *, finished: bool) -> None:
        """Tell every shard that nothing more comes, and how many pushes it must have received."""
        wire, fields = self._wire, (self._learner_id, self._pushes, finished)
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.GOODBYE, fields))


# ------------------------------------------------------------------------------------------- where learners double as shards


class TeamChannel(ShardChannel):
    """Both ends in one: gradients are exchanged, and weights shared, by collectives over all learners (`allreduce.py`).

    To the shard, it is a channel: the shard answers the pulls of all learners at once, which begins an all-gather; the learner
    waits for it in `pull`. The order is the same everywhere, and nobody waits for anything else between: so there is no deadlock.

    Args:
        weights, gradients: (parameters,) float32 host memory of the learner.
        received: (learners * slice,) float32, the gradients of all learners for the slice of this shard.
        bounds: the slice of each shard.
    """

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        *,
        weights: np.ndarray,
        gradients: np.ndarray,
        received: np.ndarray,
        bounds: list[tuple[int, int]],
    ) -> None:
        super().__init__(wire, roles, learner_id)
        self._team = wire.team(roles.learner_ranks, bounds)
        self._weights = weights
        self._gradients = gradients
        self._received = received
        self._sharing: Any = None
        self._clock = 0
        self._exchanged_ns = self._shared_ns = 0
        self._push_ns = self._wait_ns = self._pull_ns = 0
        self.watched = roles.dedicated_evaluator
        """Whether an evaluator asks for snapshots while the run goes on."""
        self.now_ns = wire.now_ns
        self.sleep = wire.sleep

    def exchange(self, *, seq: int, samples: int, loss: float, compute_ns: int, delay_ns: int) -> list[Push]:
        """Give every shard its slice of this learner's gradient; the slices of all learners for this shard are in `received`.

        Returns the headers, in the order of learner_id. A push arrives when all have told theirs, for no slice moves before; so its
        seconds hold the wait for the slowest learner, which elsewhere a learner spends in its pull.

        Raises PeerError where a header is another learner's, or of a model of another size.
        """
        start_ns, nbytes = self.now_ns(), self._gradients.nbytes
        waited = (self._push_ns, self._wait_ns, self._pull_ns)
        told = (self._shard, self._clock, seq, samples, compute_ns, delay_ns, *waited, nbytes, loss)
        headers = self._team.tell(Tag.PUSH, told)
        arrival_ns = self.now_ns()
        pushes = [Push._make((*fields, arrival_ns)) for fields in headers]
        for learner_id, push in enumerate(pushes):
            if push.learner_id != learner_id or push.nbytes != nbytes:
                raise PeerError(
                    f"learner {learner_id} says it is learner {push.learner_id}, its gradient {push.nbytes} bytes;"
                    f" expected {nbytes} bytes"
                )
        self._team.exchange(self._gradients, self._received)
        self._exchanged_ns = self.now_ns()
        self._push_ns = self._exchanged_ns - start_ns
        return pushes

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        """Begin to share the new weights of this shard with all learners."""
        self._clock = clock
        self._shared_ns = self.now_ns()
        self._sharing = self._team.share(weights, self._weights)

    def finish_answers(self) -> None:
        """`pull` waits for them."""

    def pull(self) -> int:
        """Wait until the weights of all shards are in place; returns their clock."""
        self._team.finish(self._sharing)
        self._wait_ns = self._shared_ns - self._exchanged_ns
        self._pull_ns = self.now_ns() - self._shared_ns
        return self._clock

    def stop(self, learner_id: int, clock: int) -> None:
        """Every learner knows it from its own shard."""

    def goodbyes(self, pushed: int) -> list[Goodbye]:
        """Tell every shard how many pushes it must have received from this learner; what all learners tell this one."""
        told = self._team.tell(Tag.GOODBYE, (self._shard, pushed, True))
        self._team.disband()
        return [Goodbye(*fields) for fields in told]


# ------------------------------------------------------------------------------------------------------ evaluator's side


class Snapshot(NamedTuple):
    """Weights of all shards were received, each slice of its shard's clock; samples and seconds are shard 0's."""

    number: int
    clocks: tuple[int, ...]
    samples: int
    taken_s: float


class EvaluatorChannel:
    """The evaluator's end: pulls snapshots, one after the other.

    Args:
        weights: (parameters,) float32 host memory that theta is received into.
        averaged: the same for thetabar, or None where the run keeps none.
        bounds: the slice of each shard.
        serve_here: lets the shard that is on this very rank, where one is, take a message; it must, before it can be waited for.
    """

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        *,
        weights: np.ndarray,
        averaged: np.ndarray | None,
        bounds: list[tuple[int, int]],
        serve_here: Callable[[], None] | None = None,
    ) -> None:
        self._wire = wire
        self._ranks = roles.shard_ranks
        self._serve_here = serve_here
        self._vectors = [weights] if averaged is None else [weights, averaged]
        self._bounds = bounds

    def now_s(self) -> float:
        return self._wire.now_ns() * 1e-9

    def pull(self, number: int) -> Snapshot | None:
        """Wait until every shard has snapshot `number` (or FINAL); None where the run ended before it.

        All are asked at once: where learners double as shards, each answers between two mini-batches only.
        """
        asked = [self._ask(number, shard) for shard in range(len(self._ranks))]
        answers = [self._answer(number, shard, each) for shard, each in enumerate(asked)]
        if not all(there for there, _, _, _ in answers):
            return None
        _, _, samples, taken_s = answers[0]
        return Snapshot(number, tuple(clock for _, clock, _, _ in answers), samples, taken_s)

    def _ask(self, number: int, shard: int) -> Any:
        rank, (start, end) = self._ranks[shard], self._bounds[shard]
        slices = (vector[start:end] for vector in self._vectors)
        asked = self._wire.ask(rank, Tag.SNAPSHOT_PULL, (number,), Tag.SNAPSHOT_ANSWER, *slices)
        self._let_serve(rank)
        return asked

    def _answer(self, number: int, shard: int, asked: Any) -> tuple[bool, int, int, float]:
        wire, rank = self._wire, self._ranks[shard]
        start, end = self._bounds[shard]
        sender, there, clock, samples, taken_ns, nbytes = wire.header(asked)
        expected = 4 * (end - start) if there else 0
        if sender != shard or nbytes != expected:
            raise PeerError(f"snapshot {number} of rank {rank}: shard {sender}, {nbytes} bytes; expected {shard}, {expected}")
        wire.finish(asked)
        return bool(there), clock, samples, taken_ns * 1e-9

    def goodbye(self) -> None:
        wire = self._wire
        for rank in self._ranks:
            sent = wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE,))
            self._let_serve(rank)
            wire.finish(sent)

    def _let_serve(self, rank: int) -> None:
        if rank == self._wire.rank and self._serve_here is not None:
            self._serve_here()
