"""The evaluator's end: pulls snapshots from all shards during training (`evaluator.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import NOTHING_MORE, Tag
from mpisgd.exchange.exchange import Interrupted
from mpisgd.exchange.roles import Roles
from mpisgd.records.checkpoint.snapshots import Taken


class Snapshot(NamedTuple):
    """A snapshot from all shards, each slice at its own clock; samples and seconds are shard 0's."""

    number: int
    clocks: tuple[int, ...]
    samples: int
    taken_s: float


class Here(Protocol):
    """The shard on the evaluator's own rank, reached without messages."""

    def snapshot(self, number: int) -> Taken:
        """Serve other ranks until this snapshot exists; return empty vectors if never."""

    def interrupt(self, signal: int) -> None:
        """Take a signal to this rank."""

    def end_evaluation(self) -> None:
        """End the evaluation."""


class EvaluatorChannel:
    """The evaluator's end.

    Args:
        weights, averaged: (parameters,) float32 host memory for theta, and for thetabar if any.
        to_first: say goodbye to shard 0 alone, for passing on.
    """

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        *,
        weights: np.ndarray,
        averaged: np.ndarray | None,
        bounds: list[tuple[int, int]],
        here: Here | None = None,
        to_first: bool = False,
    ) -> None:
        self._wire = wire
        self._ranks = roles.shard_ranks
        self._first_shard = roles.first_shard
        self._parting = self._ranks[:1] if to_first else self._ranks
        self._here = here
        self._vectors = [weights] if averaged is None else [weights, averaged]
        self._bounds = bounds
        self._signal_told = False
        self._enough = 0

    def now_s(self) -> float:
        return self._wire.clock.now_ns() * 1e-9

    def pull(self, number: int, shards: Sequence[int] = (), vectors: Sequence[np.ndarray] = (), start: int = 0) -> Snapshot | None:
        """Wait until every shard has snapshot `number` (or FINAL); return None where the run ended before.

        With `shards`, pull from these alone, into `vectors` from element `start` on. Samples and seconds are the first shard's. All
        are asked at once: a learner doubling as a shard answers only between two mini-batches.
        """
        wire = self._wire
        self._tell_of_signal()
        shards = shards or range(len(self._ranks))
        asked = [self._ask(number, shard, vectors or self._vectors, start) for shard in shards]
        if number >= 0:
            for each in asked:
                if each is not None:
                    wire.header_or_signal(each)
            self._tell_of_signal()
        answers = []
        for shard, each in zip(shards, asked, strict=True):
            found = self._found_here(number, shard, vectors or self._vectors, start) if each is None else None
            answers.append(found or self._answer(number, shard, each))
        if not all(there for there, _, _, _ in answers):
            return None
        _, _, samples, taken_s = answers[0]
        return Snapshot(number, tuple(clock for _, clock, _, _ in answers), samples, taken_s)

    def check(self) -> None:
        """Raise Interrupted after a signal to this rank."""
        if self._wire.signal > 0:
            raise Interrupted

    def _tell_of_signal(self) -> None:
        """Tell all shards, once, of a signal perhaps unheard elsewhere."""
        if self._wire.signal > 0 and not self._signal_told:
            self._signal_told = True
            self._tell(self._ranks, Tag.INTERRUPT, self._wire.signal)
            if self._here is not None:
                self._here.interrupt(self._wire.signal)

    def end_training(self, snapshot: int) -> None:
        """End training, with the next pull: this snapshot is good enough."""
        self._enough = 1 + snapshot

    def _tell(self, ranks: Sequence[int], tag: int, *words: int) -> None:
        wire = self._wire
        for rank in ranks:
            if rank != wire.rank:
                wire.finish(wire.start(rank, tag, words))

    def _ask(self, number: int, shard: int, vectors: Sequence[np.ndarray], origin: int) -> Any:
        if self._ranks[shard] == self._wire.rank:
            return None
        slices, words = self._slices(shard, vectors, origin), (number, self._enough)
        return self._wire.ask(self._ranks[shard], Tag.SNAPSHOT_PULL, words, Tag.SNAPSHOT_ANSWER, slices)

    def _slices(self, shard: int, vectors: Sequence[np.ndarray], origin: int) -> tuple[np.ndarray, ...]:
        start, end = self._bounds[shard]
        return tuple(vector[start - origin : end - origin] for vector in vectors)

    def _found_here(self, number: int, shard: int, vectors: Sequence[np.ndarray], origin: int) -> tuple[bool, int, int, float]:
        assert self._here is not None
        taken = self._here.snapshot(number)
        there = taken.vectors[0].size > 0
        if there:
            for own, given in zip(self._slices(shard, vectors, origin), taken.vectors, strict=True):
                own[:] = given
        return there, taken.clock, taken.samples, taken.taken_s

    def _answer(self, number: int, shard: int, asked: Any) -> tuple[bool, int, int, float]:
        wire, rank = self._wire, self._ranks[shard]
        start, end = self._bounds[shard]
        sender, there, clock, samples, taken_ns, nbytes = wire.header(asked)
        expected, own = 4 * (end - start) if there else 0, self._first_shard + shard
        if sender != own or nbytes != expected:
            raise PeerError(f"snapshot {number} of rank {rank}: shard {sender}, {nbytes} bytes; expected {own}, {expected}")
        if clock < 0:
            raise PeerError(f"snapshot {number} of rank {rank}: clock {clock}; expected 0 or more")
        wire.finish(asked)
        return bool(there), clock, samples, taken_ns * 1e-9

    def goodbye(self) -> None:
        self._tell(self._parting, Tag.SNAPSHOT_PULL, NOTHING_MORE, 0)
        if self._here is not None:
            self._here.end_evaluation()
