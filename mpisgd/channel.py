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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpisgd.errors import PeerError
from mpisgd.messages import (
    NOTHING_MORE,
    Goodbye,
    Message,
    Pull,
    Push,
    SnapshotPull,
    Tag,
    answer_header,
    goodbye_header,
    pull_header,
    push_header,
    snapshot_answer_header,
    snapshot_pull_header,
)
from mpisgd.roles import Roles

if TYPE_CHECKING:
    from mpisgd.wire import Envelope, Wire

_EMPTY = np.zeros(0, np.float32)


# --------------------------------------------------------------------------------------------------------- shard's side


class ShardChannel:
    """A shard's end: receives whatever comes, answers the pulls that the protocol allows."""

    def __init__(self, wire: Wire, roles: Roles, shard: int) -> None:
        self._wire = wire
        self._roles = roles
        self._learner_of_rank = {rank: learner_id for learner_id, rank in enumerate(roles.learner_ranks)}
        self._shard = shard
        self._headers = {
            Tag.PUSH: push_header(),
            Tag.PULL: pull_header(),
            Tag.GOODBYE: goodbye_header(),
            Tag.SNAPSHOT_PULL: snapshot_pull_header(),
        }
        self._answer = answer_header()
        self._under_way: list[Any] = []
        self._snapshot_answer = snapshot_answer_header()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._wire.now_ns() * 1e-9

    def receive(self, gradient: np.ndarray, learner_id: int | None = None) -> Message:
        """Wait for the next message, of one learner or of anybody; a push's slice goes into `gradient`.

        Pulls go before pushes: a learner that waits for weights computes nothing; and where pulls wait behind a queue of pushes,
        all who queue are given the same weights, and then compute, push and queue in step.

        Pulls are taken from anybody at any time: a learner whose turn to push has not come must be given weights to compute.

        Args:
            gradient: (slice,) float32, C-contiguous.
            learner_id: whose push or goodbye it must be, or None.

        Raises:
            PeerError: wrong tag, magic, sender or size.
        """
        wire = self._wire
        if learner_id is None:
            envelope = wire.probe((None, Tag.PULL), (None, None))
        else:
            envelope = wire.probe(
                (self._roles.learner_ranks[learner_id], None),
                (None, Tag.PULL),
                (self._roles.evaluator_rank, Tag.SNAPSHOT_PULL),
            )
        arrival_s = self.now_s()
        header = self._accept_header(envelope)
        match envelope.tag:
            case Tag.PUSH:
                (sender, timestamp, seq, samples, compute, delay, push, wait, pull, nbytes, loss) = header
                if nbytes != gradient.nbytes:
                    raise PeerError(f"push of rank {envelope.source}: a slice of {nbytes} bytes, expected {gradient.nbytes}")
                wire.accept(wire.probe((envelope.source, Tag.GRADIENT)), gradient)
                return Push(
                    sender, timestamp, seq, samples, compute * 1e-9, delay * 1e-9, push * 1e-9, wait * 1e-9, pull * 1e-9,
                    loss, arrival_s,
                )  # fmt: skip
            case Tag.PULL:
                return Pull(*header)
            case Tag.GOODBYE:
                return Goodbye(header[0], header[1], bool(header[2]))
        return SnapshotPull(header[0])

    def _accept_header(self, envelope: Envelope) -> tuple[Any, ...]:
        header = self._headers.get(envelope.tag)  # type: ignore[call-overload]
        if header is None:
            names = ", ".join(tag.name for tag in self._headers)
            raise PeerError(f"rank {envelope.source} sent tag {envelope.tag}: expected one of {names}")
        self._wire.accept(envelope, header.wire)
        fields: tuple[Any, ...] = header.fields(envelope.source)
        if envelope.tag == Tag.SNAPSHOT_PULL:
            if envelope.source != self._roles.evaluator_rank:
                raise PeerError(f"rank {envelope.source} pulled a snapshot: only rank {self._roles.evaluator_rank} may")
        elif self._learner_of_rank.get(envelope.source) != fields[0]:
            raise PeerError(f"rank {envelope.source} says it is learner {fields[0]}: it is not")
        return fields

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        """Begin to send weights to learners whose pulls may be answered; `weights` must stay until `finish_answers`."""
        for learner_id in learner_ids:
            rank = self._roles.learner_ranks[learner_id]
            verdict = verdicts.get(learner_id, 0)
            self._wire.send(self._answer.fill(self._shard, clock, 0, verdict, weights.nbytes), rank, Tag.ANSWER)
            self._under_way.append(self._wire.start_send(weights, rank, Tag.WEIGHTS))

    def finish_answers(self) -> None:
        """Wait until the answers have left."""
        self._wire.finish(self._under_way)
        self._under_way.clear()

    def stop(self, learner_id: int, clock: int) -> None:
        """Answer a pull: there are no more weights, the run is over. An empty slice ends the receive that was posted."""
        rank = self._roles.learner_ranks[learner_id]
        self._wire.send(self._answer.fill(self._shard, clock, 1, 0, 0), rank, Tag.ANSWER)
        self._wire.send(_EMPTY, rank, Tag.WEIGHTS)

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        """Send a snapshot: theta and, where weights are averaged, thetabar; empty vectors = there is no such snapshot."""
        dest = self._roles.evaluator_rank
        nbytes = vectors[0].nbytes
        answer = self._snapshot_answer.fill(self._shard, nbytes > 0, clock, samples, int(taken_s * 1e9), nbytes)
        self._wire.send(answer, dest, Tag.SNAPSHOT_ANSWER)
        for vector in vectors:
            self._wire.send(vector, dest, Tag.SNAPSHOT_WEIGHTS)


# ------------------------------------------------------------------------------------------------------- learner's side


class Answers(NamedTuple):
    """What the shards answered to a pull: the clock of each slice, or that the run is over."""

    clocks: tuple[int, ...]
    stop: bool
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
        wire: Wire,
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
        self._consistent = consistent
        self._push = [push_header() for _ in bounds]
        self._pull = pull_header()
        self._answers = [answer_header() for _ in bounds]
        self._clocks = [-1] * len(bounds)
        self.pushed = [0] * len(bounds)

    def now_ns(self) -> int:
        return self._wire.now_ns()

    def sleep(self, seconds: float) -> None:
        self._wire.sleep(seconds)

    def push(self, *, seq: int, samples: int, loss: float, compute_ns: int, delay_ns: int, last: Answers, push_ns: int) -> int:
        """Send the gradient to every shard, each slice with the clock of the weights it was computed from.

        `last` and `push_ns` tell how long the pull before this mini-batch, and the push before that, took. Returns
        nanoseconds.
        """
        start_ns = self.now_ns()
        wire, transfers = self._wire, []
        for shard, rank in enumerate(self._ranks):
            header = self._push[shard].fill(
                self._learner_id,
                self._clocks[shard],
                seq,
                samples,
                compute_ns,
                delay_ns,
                push_ns,
                last.wait_ns,
                last.pull_ns,
                self._gradients[shard].nbytes,
                loss,
            )
            announced = wire.announce(header, rank, Tag.PUSH)
            transfers.append((announced, wire.start_send(self._gradients[shard], rank, Tag.GRADIENT)))
            self.pushed[shard] += 1
        for announced, sent in transfers:
            wire.wait(announced)
            wire.finish([sent])
        return self.now_ns() - start_ns

    def pull(self, min_clock: int, meanwhile: Callable[[], None] = lambda: None) -> Answers:
        """Receive the weights of every shard, each of a clock of at least `min_clock`; call `meanwhile` once they are asked for.

        Where the protocol promises one clock over all shards, the lagging shards are asked again until all agree; a slower
        shard is never waited for by another shard (law 2).
        """
        start_ns = self.now_ns()
        shards = range(len(self._ranks))
        stop, began_ns = self._ask(list(shards), [min_clock] * len(shards), meanwhile)
        while self._consistent and not stop and len(set(self._clocks)) > 1:
            newest = max(self._clocks)
            lagging = [shard for shard in shards if self._clocks[shard] < newest]
            stop, _ = self._ask(lagging, [newest] * len(lagging), lambda: None)
        return Answers(clocks=tuple(self._clocks), stop=stop, wait_ns=began_ns - start_ns, pull_ns=self.now_ns() - began_ns)

    def _ask(self, shards: list[int], min_clocks: list[int], meanwhile: Callable[[], None]) -> tuple[bool, int]:
        """Pull from some shards: post all receives, ask all, then take the answers as they were posted."""
        wire = self._wire
        headers = [wire.post_receive(self._answers[shard].wire, self._ranks[shard], Tag.ANSWER) for shard in shards]
        slices = [wire.post_receive(self._weights[shard], self._ranks[shard], Tag.WEIGHTS) for shard in shards]
        for shard, min_clock in zip(shards, min_clocks, strict=True):
            wire.send(self._pull.fill(self._learner_id, min_clock), self._ranks[shard], Tag.PULL)
        meanwhile()
        stop, began_ns = False, 0
        for shard, min_clock, header, weights in zip(shards, min_clocks, headers, slices, strict=True):
            wire.wait(header)
            began_ns = began_ns or self.now_ns()
            sender, clock, stopped, _, nbytes = self._answers[shard].fields(self._ranks[shard])
            expected = 0 if stopped else self._weights[shard].nbytes
            if sender != shard or nbytes != expected or (clock < min_clock and not stopped):
                raise PeerError(
                    f"answer of rank {self._ranks[shard]}: shard {sender}, {nbytes} bytes, clock {clock};"
                    f" expected shard {shard}, {expected} bytes, clock >= {min_clock}"
                )
            wire.finish([weights])
            if stopped:
                stop = True
            else:
                self._clocks[shard] = clock
        return stop, began_ns

    def goodbye(self, *, finished: bool) -> None:
        """Tell every shard that nothing more comes, and how many pushes it must have received."""
        for shard, rank in enumerate(self._ranks):
            header = goodbye_header().fill(self._learner_id, self.pushed[shard], finished)
            self._wire.wait(self._wire.announce(header, rank, Tag.GOODBYE))


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
    """

    def __init__(
        self, wire: Wire, roles: Roles, *, weights: np.ndarray, averaged: np.ndarray | None, bounds: list[tuple[int, int]]
    ) -> None:
        self._wire = wire
        self._ranks = roles.shard_ranks
        self._vectors = [weights] if averaged is None else [weights, averaged]
        self._bounds = bounds
        self._pull = snapshot_pull_header()
        self._answer = snapshot_answer_header()

    def now_s(self) -> float:
        return self._wire.now_ns() * 1e-9

    def pull(self, number: int) -> Snapshot | None:
        """Wait until every shard has snapshot `number` (or FINAL); None where the run ended before it."""
        answers = [self._pull_slice(number, shard) for shard in range(len(self._ranks))]
        if not all(there for there, _, _, _ in answers):
            return None
        _, _, samples, taken_s = answers[0]
        return Snapshot(number, tuple(clock for _, clock, _, _ in answers), samples, taken_s)

    def _pull_slice(self, number: int, shard: int) -> tuple[bool, int, int, float]:
        wire, rank = self._wire, self._ranks[shard]
        start, end = self._bounds[shard]
        header = wire.post_receive(self._answer.wire, rank, Tag.SNAPSHOT_ANSWER)
        slices = [wire.post_receive(vector[start:end], rank, Tag.SNAPSHOT_WEIGHTS) for vector in self._vectors]
        wire.send(self._pull.fill(number), rank, Tag.SNAPSHOT_PULL)
        wire.wait(header)
        sender, there, clock, samples, taken_ns, nbytes = self._answer.fields(rank)
        expected = 4 * (end - start) if there else 0
        if sender != shard or nbytes != expected:
            raise PeerError(f"snapshot {number} of rank {rank}: shard {sender}, {nbytes} bytes; expected {shard}, {expected}")
        wire.finish(slices)
        return bool(there), clock, samples, taken_ns * 1e-9

    def goodbye(self) -> None:
        for rank in self._ranks:
            self._wire.send(self._pull.fill(NOTHING_MORE), rank, Tag.SNAPSHOT_PULL)
