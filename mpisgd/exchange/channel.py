"""Push, pull and stop over a communicator: tags, headers, buffers, and who may block on whom (DESIGN 4, law 1).

                 learner                                    shard
    push         PUSH header, GRADIENT slice          ->    takes it when its turn comes
    pull         posts ANSWER, WEIGHTS; PULL header   ->    keeps the request until the protocol allows an answer
                 <- ANSWER header, WEIGHTS in chunks        or ANSWER with an ending: no weights follow
    interrupt    INTERRUPT header                      ->    comes to an end, whoever heard the signal
    notice       may post NOTICE                      <-   tells a learner that still computes: an update was made
    goodbye      GOODBYE header                       ->    forgets the learner; drained when all have said it

No deadlock by construction. A learner pushes to all shards at once, in no order that could cross another's, and has finished
before it pulls. A shard never waits for one particular learner to *receive*: it sends only answers, whose receives the learner
posted before it asked. So a shard always gets back to its probe, and every send of a learner ends. The evaluator pulls
snapshots in the same way (`evaluator_channel.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Communicator, Pattern
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
from mpisgd.rules.verdict import Kind
from mpisgd.vectors.chunks import chunks_of

_EMPTY: np.ndarray = np.zeros(0, np.float32)
_PULLS = ((None, Tag.PULL),)
_ANYBODY = ((None, Tag.PULL), (None, None))
# What a cycle of one gradient needs, without a look into the enumeration or a constructor with a dozen arguments:
_PUSH = Tag.PUSH
_PULL = Tag.PULL
_ANSWER = Tag.ANSWER
_GOES_ON: int = Ending.NONE
_LAST_ENDING = Ending.INTERRUPTED
_REJECT = Kind.REJECT
_NEVER = math.inf
_TO_SHARDS = "PUSH, PULL, GOODBYE, GAVE_UP, INTERRUPT or SNAPSHOT_PULL"


# --------------------------------------------------------------------------------------------------------- shard's side


class ShardChannel:
    """A shard's end: receives whatever comes, answers the pulls that the protocol allows."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int) -> None:
        self._wire = wire
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
        self._begun_push = False
        self.chunks_count = 1
        """In how many chunks this shard's slice is sent."""

    def rank_of(self, learner_id: int) -> int:
        return self._learner_ranks[learner_id]

    def learner_of(self, rank: int) -> int:
        """The learner_id of a rank; -1 = it is none."""
        return self._learner_of_rank[rank] if 0 <= rank < len(self._learner_of_rank) else -1

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._wire.now_ns() * 1e-9

    def receive(self, gradient: Buffer, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        """Wait for the next message, of one learner or of anybody; a push's slice goes into `gradient`.

        Pulls go before pushes: a learner that waits for weights computes nothing; and where pulls wait behind a queue of pushes,
        all who queue are given the same weights, and then compute, push and queue in step.

        Pulls are taken from anybody at any time: a learner whose turn to push has not come must be given weights to compute.

        Args:
            gradient: (slice,), C-contiguous, of the type that gradients travel in.
            learner_id: whose push or goodbye it must be, or None.
            until_s: None is returned where nothing has come by this second.

        A message that cannot be (wrong tag, magic, sender, size or number of gradients) is received into memory of its own, and
        Refused is returned. Raises PeerError where a rank is lost without which there is no job (`tolerant.py`).
        """
        return self._receive_or_refuse(gradient, _ANYBODY if learner_id is None else self._only(learner_id), until_s)

    def receive_pull(self) -> Message | None:
        """A pull that has come; None where none has."""
        return self._receive_or_refuse(_EMPTY, _PULLS, 0.0)

    def _receive_or_refuse(self, gradient: Buffer, patterns: tuple[Pattern, ...], until_s: float) -> Message | None:
        try:
            return self._receive(gradient, patterns, until_s)
        except PeerError as error:
            if error.rank < 0:  # not what a rank sent, but what has become of one
                raise
            refused, self._begun_push = Refused(error.rank, str(error), self._begun_push), False
            return refused

    def _receive(self, gradient: Buffer, patterns: tuple[Pattern, ...], until_s: float) -> Message | None:
        wire = self._wire
        if until_s == _NEVER:
            source, tag, fields = wire.take(patterns)
        else:
            taken = wire.take_until(patterns, math.ceil(until_s * 1e9))
            if taken is None:
                return None
            source, tag, fields = taken
        sender: int = fields[0]
        if (self._learner_of_rank[source] != sender or sender < 0) and tag not in (Tag.SNAPSHOT_PULL, Tag.INTERRUPT):
            return self._news(source, tag, sender)
        if tag == _PULL:
            pull: tuple[int, int] = fields
            return Pull(sender, pull[1])
        if tag == _PUSH:
            push = Push(fields, wire.now_ns())
            self._begun_push = True
            if push.nbytes != gradient.nbytes:
                raise PeerError(f"push of rank {source}: a slice of {push.nbytes} bytes, expected {gradient.nbytes}", source)
            if push.gradients != self._team_sizes[sender]:
                raise PeerError(f"push of rank {source}: {push.gradients} gradients, expected {self._team_sizes[sender]}", source)
            whole = wire.take_body(gradient)
            self._begun_push = False
            return push if whole else Torn(push)
        return self._seldom(source, tag, fields)

    def _news(self, source: int, tag: int, sender: int) -> Message:
        """Take what the communicator says of a rank, as if that had sent it. Raises PeerError where the rank itself has sent
        that."""
        if tag == Tag.LOST:
            return Lost(source, self._learner_of_rank[source])
        if tag == Tag.STUCK:
            return Stuck(source, self._learner_of_rank[source])
        raise PeerError(f"rank {source} says it is learner {sender}: it is not", source)

    def _seldom(self, source: int, tag: int, fields: Fields) -> Message:
        """Take what comes once in a run, or now and then. Raises PeerError."""
        sender: int = fields[0]
        if tag == Tag.GOODBYE:
            _, pushed, ending = fields
            if not 0 <= ending <= Ending.INTERRUPTED:
                raise PeerError(f"rank {source} says goodbye with ending {ending}: expected 0 ... {Ending.INTERRUPTED:d}", source)
            return Goodbye(sender, pushed, ending)
        if tag == Tag.GAVE_UP:
            _, seq = fields
            return GaveUp(sender, seq)
        if tag == Tag.SNAPSHOT_PULL:
            if fields[0] < NOTHING_MORE:
                raise PeerError(f"rank {source} pulled snapshot {fields[0]}: expected {NOTHING_MORE} or more", source)
            if source != self._evaluator_rank:
                self._succeeds(source)
            return SnapshotPull(*fields)
        if tag == Tag.INTERRUPT:
            if sender not in HEARD:
                raise PeerError(f"rank {source} tells of signal {sender}: expected one of {', '.join(map(name_of, HEARD))}", source)
            return Interrupt(sender)
        raise PeerError(f"rank {source} sent {Tag(tag).name} to a shard: expected {_TO_SHARDS}", source)

    def _succeeds(self, rank: int) -> None:
        """Another rank asks for snapshots than did before. Raises PeerError."""
        raise PeerError(f"rank {rank} pulled a snapshot: only rank {self._evaluator_rank} may", rank)

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
        wire, nbytes = self._wire, weights.nbytes
        for learner_id in learner_ids:
            opened = wire.open(self._learner_ranks[learner_id], _ANSWER, self._answer(learner_id, clock, verdicts, nbytes))
            for chunk in self._chunks:
                wire.add(opened, chunk)
            self._opened.append(opened)

    def add_chunk(self, chunk: Buffer) -> None:
        """The next chunk of the weights is made."""
        self._chunks.append(chunk)
        for opened in self._opened:
            self._wire.add(opened, chunk)

    def close_answers(self) -> None:
        """All chunks are made."""
        self._under_way += [self._wire.close(opened) for opened in self._opened]
        self._opened.clear()
        self._chunks.clear()

    def _answer(self, learner_id: int, clock: int, verdicts: dict[int, int], nbytes: int) -> Fields:
        return (self._shard, clock, _GOES_ON, verdicts.get(learner_id, 0), self._notices[learner_id], nbytes)

    def finish_answers(self) -> bool:
        """Wait until the answers have left; False where one was given up, and its weights must stay as they are for ever."""
        all_left = True
        for answer in self._under_way:
            if not self._wire.finish(answer):
                all_left = False
        self._under_way.clear()
        return all_left

    def stop(self, learner_id: int, clock: int, ending: int) -> None:
        """Answer a pull: there are no more weights, and why. Empty chunks end the receives that were posted."""
        wire, fields = self._wire, (self._shard, clock, ending, 0, self._notices[learner_id], 0)
        wire.finish(wire.start(self._learner_ranks[learner_id], Tag.ANSWER, fields, *[_EMPTY] * self.chunks_count))

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


# ------------------------------------------------------------------------------------------------------- learner's side


class Answers:
    """Answers of the shards to a pull: the clock of each slice, or that there are no more weights.

    Args:
        stop: an `Ending`; nothing but NONE means that there are weights.
        rejected: whether any shard rejected the gradient pushed last: the same mini-batch is to be computed again.
        wait_ns: from the request until the first answer began.
        pull_ns: from there until the weights of all shards were in place.
    """

    __slots__ = ("clocks", "pull_ns", "rejected", "stop", "wait_ns")

    def __init__(self, clocks: tuple[int, ...], stop: int, rejected: bool, wait_ns: int, pull_ns: int) -> None:
        self.clocks = clocks
        self.stop = stop
        self.rejected = rejected
        self.wait_ns = wait_ns
        self.pull_ns = pull_ns

    @property
    def oldest(self) -> int:
        """The least of the clocks, found without a call of a builtin: once for each gradient."""
        oldest = self.clocks[0]
        for clock in self.clocks:
            if clock < oldest:  # noqa: PLR1730
                oldest = clock
        return oldest

    def kept(self) -> Answers:
        """Use the same weights once more, without a pull."""
        return Answers(self.clocks, self.stop, self.rejected, 0, 0)


class Interrupted(Exception):
    """The gradient that this learner is computing is not wanted: an update was made without it, or the run is over."""


class LearnerChannel:
    """A learner's end: pushes slices of its gradient to all shards, pulls slices of the weights from all shards.

    Args:
        weights: (parameters,) float32 host memory that pulled slices are received into.
        gradients: (parameters,) float32 host memory that pushed slices are sent from; or int16 (`rounding.py`).
        bounds: the slice of each shard, `flat.slice_bounds`.
        consistent: pull until all slices have one clock.
        interruptible: the shards may tell this learner that its gradient comes too late.
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
        interruptible: bool = False,
    ) -> None:
        self._wire = wire
        self._ranks = list(roles.shard_ranks)
        self._interruptible = interruptible
        self._notices: list[deque[Any]] = [deque() for _ in bounds]
        self._noticed = [0] * len(bounds)
        self._learner_id = learner_id
        self._team = len(roles.teams[learner_id])
        self._weights = [chunks_of(weights[start:end]) for start, end in bounds]
        self._gradients = [gradients[start:end] for start, end in bounds]
        self._nbytes = [part.nbytes for part in self._gradients]
        self._weights_nbytes = [weights[start:end].nbytes for start, end in bounds]
        self._consistent = consistent and len(bounds) > 1
        self._shards = list(range(len(bounds)))
        self._clocks = [-1] * len(bounds)
        self._pushes = 0
        self._rejected = False
        self._asks = False
        self._duty: Any = None
        self._signal_told = False

    @property
    def pushed(self) -> list[int]:
        """Pushes to each shard."""
        return [self._pushes for _ in self._shards]

    @property
    def newest_clock(self) -> int:
        """Newest clock of the weights that have come; -1 before the first."""
        return max(self._clocks)

    def now_ns(self) -> int:
        """Nanoseconds since the start of the run."""
        return self._wire.now_ns()

    def sleep(self, seconds: float) -> None:
        self._wire.sleep(seconds)

    def push(
        self,
        *,
        seq: int,
        samples: int,
        loss: float,
        compute_ns: int,
        delay_ns: int,
        last: Answers,
        push_ns: int,
        rounded: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> int:
        """Send the gradient to every shard, each slice with the clock of the weights it was computed from.

        `last` and `push_ns` tell how long the pull before this mini-batch, and the push before that, took; `rounded`, what was
        rounded off (`rounding.py`). `meanwhile`, called while the gradient leaves, may read it. Returns nanoseconds, until both
        have ended.
        """
        wire, learner_id, wait_ns, pull_ns = self._wire, self._learner_id, last.wait_ns, last.pull_ns
        start_ns = wire.now_ns()
        transfers = []
        for shard, clock in enumerate(last.clocks):
            nbytes = self._nbytes[shard]
            spent = (compute_ns, delay_ns, push_ns, wait_ns, pull_ns)
            told = (learner_id, clock, seq, samples, self._team, *spent, nbytes, rounded, loss)
            transfers.append(wire.start(self._ranks[shard], _PUSH, told, self._gradients[shard]))
        self._pushes += 1
        if meanwhile is not None:
            meanwhile()
        for transfer in transfers:
            wire.finish(transfer)
        return wire.now_ns() - start_ns

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Receive the weights of every shard, each of a clock of at least `min_clock`; call `meanwhile` once they are asked for.

        Where the protocol promises one clock over all shards, the lagging shards are asked again until all agree; a slower
        shard is never waited for by another shard (law 2).
        """
        wire, shards = self._wire, self._shards
        if wire.signal > 0:
            self._tell_of_signal()
        start_ns = wire.now_ns()
        self._rejected = False
        stop, began_ns = self._ask(shards, min_clock, meanwhile)
        while self._consistent and not stop and len(set(self._clocks)) > 1:
            newest = max(self._clocks)
            lagging = [shard for shard in shards if self._clocks[shard] < newest]
            stop, _ = self._ask(lagging, newest, None)
        return Answers(tuple(self._clocks), stop, self._rejected, began_ns - start_ns, wire.now_ns() - began_ns)

    def _tell_of_signal(self) -> None:
        """A signal has told this rank to come to an end: all shards are told, once."""
        if self._signal_told:
            return
        self._signal_told = True
        wire = self._wire
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.INTERRUPT, (wire.signal,)))

    def _ask(self, shards: list[int], min_clock: int, meanwhile: Callable[[], None] | None) -> tuple[int, int]:
        """Pull from some shards: ask all, the receives of their answers posted, then take the answers in that order."""
        wire, ranks, weights = self._wire, self._ranks, self._weights
        question = (self._learner_id, min_clock)
        if self._interruptible:
            self._post_notices(shards)
        asked = [wire.ask(ranks[shard], _PULL, question, _ANSWER, *weights[shard]) for shard in shards]
        if meanwhile is not None:
            meanwhile()
        stop, began_ns = _GOES_ON, 0
        for at, shard in enumerate(shards):
            answer = asked[at]
            fields: tuple[int, int, int, int, int, int] = wire.header(answer)
            sender, clock, stopped, verdict, notices, nbytes = fields
            began_ns = began_ns or wire.now_ns()
            expected = 0 if stopped else self._weights_nbytes[shard]
            if sender != shard or nbytes != expected or (clock < min_clock and not stopped) or stopped > _LAST_ENDING:
                raise PeerError(
                    f"ANSWER of rank {ranks[shard]}: shard {sender}, {nbytes} bytes, clock {clock}, ending {stopped};"
                    f" expected shard {shard}, {expected} bytes, clock >= {min_clock}, ending <= {_LAST_ENDING}"
                )
            wire.finish(answer)
            while self._noticed[shard] < notices:  # sent before the answer: of a mini-batch that is done with
                self._take_notice(shard)
            if stopped:  # where they differ, the run is over: others will come to that, too
                stop = min(stop, stopped) if stop else stopped
            else:
                self._clocks[shard] = clock
                if verdict == _REJECT:
                    self._rejected = True
        return stop, began_ns

    def _post_notices(self, shards: list[int]) -> None:
        """Two receives for each shard: it sends at most one notice for each answer, and that of the last may be under way."""
        for shard in shards:
            while len(self._notices[shard]) < 2:
                self._notices[shard].append(self._wire.post(self._ranks[shard], Tag.NOTICE))

    def _take_notice(self, shard: int) -> int:
        """The clock that a shard has told; waits for it."""
        if not self._notices[shard]:
            raise PeerError(f"ANSWER of rank {self._ranks[shard]}: more notices than it can have sent")
        posted = self._notices[shard].popleft()
        fields: tuple[int, int] = self._wire.header(posted)
        self._wire.finish(posted)
        self._noticed[shard] += 1
        return fields[1]

    def check(self) -> None:
        """Raises Interrupted where a shard has told of an update made without the gradient that is being computed.

        After the goodbye it says nothing any more: the model goes on being used, for evaluation, and a notice may still come from a
        shard that made its last update later than the one that said stop.
        """
        if not self._interruptible:
            return
        for shard, notices in enumerate(self._notices):
            while notices and self._wire.arrived(notices[0]):
                if self._take_notice(shard) > self._clocks[shard]:
                    raise Interrupted

    def interrupt_by_notices(self) -> None:
        """Look for notices while this learner sleeps (and, in virtual time, computes)."""
        self._wire.interrupt_by(self.check)

    def gave_up(self, seq: int) -> None:
        """Tell every shard that a mini-batch was given up."""
        wire = self._wire
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.GAVE_UP, (self._learner_id, seq)))

    def withdraw(self) -> None:
        """Once all ranks have met at the end: take back the receives of notices that were never sent."""
        for notices in self._notices:
            while notices:
                self._wire.withdraw(notices.popleft())

    def goodbye(self, *, ending: int) -> None:
        """Tell every shard that nothing more comes, why, and how many pushes it must have received."""
        wire, fields = self._wire, (self._learner_id, self._pushes, ending)
        self._interruptible = False
        ranks = self._ranks
        if self._asks:
            self._duty = wire.ask(ranks[0], Tag.GOODBYE, fields, Tag.DUTY)
            ranks = ranks[1:]
        for rank in ranks:
            wire.finish(wire.start(rank, Tag.GOODBYE, fields))

    def ask_for_duty(self) -> None:
        """Before the loop: where who evaluates may change (`succession.py`), shard 0 answers the goodbye."""
        self._asks = True

    def duty(self) -> bool:
        """After the goodbye: wait until shard 0 says whether this learner is to evaluate."""
        fields: tuple[int] = self._wire.header(self._duty)
        self._wire.finish(self._duty)
        return bool(fields[0])
