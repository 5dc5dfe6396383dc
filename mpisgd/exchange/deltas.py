"""Weights that are pulled as bfloat16: by how much they differ from what the learner holds, rounded (error feedback).

A learner holds h, float32, and computes from that; its shard knows h, and sends the way from there to its weights w:

    d = bfloat16(w - h), to nearest even        h = h + d, at both ends alike

What was rounded off is still in w - h, and so in the next d: an element of h is at most 1/256 of its last way from w, so that small
updates are seen, where bfloat16(w) would lose those below 1/256 of w. Shards sum, step, save and evaluate w, in float32.

    first pull     all of h = w, in float32; so it is in each attempt of a run
    Common         where learners compute on one clock over all shards, all hold the same at a clock c: h(c) = h(c-1) + d(c), made
                   with each update. Who holds h(c-1) is sent d(c), who has missed a clock all of h(c). A shard keeps one more slice
    Each           else what a learner holds is its own: it depends on the clocks that it was given. A shard keeps a slice for each

A learner that hangs, and is done without, is sent nothing until it asks again; by then it has had all that was sent before, so its
shard knows what it holds.

A learner's pushes name the clocks that it was given. Common's h is a function of the clock alone, so the log need not tell of a
learner that asked again, without a push, as shards lagged. With Each no pull is without a push, but the last. So replay has the
bits of every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.config import Config
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.memory import SizedVector, host_vector, host_view

_CHUNK = 2**17
"""Elements that are gone over at once, so that they stay in the cache (`rounding.py`): torch widens all of a delta, then adds it.
11 M take 5 ms, and at once 23."""


def advance(held: Tensor, weights: Tensor, delta: Tensor) -> None:
    """Let `delta`, (slice,) int16, be the bits of the way from `held` to `weights`, (slice,) float32, and go it."""
    for at in range(0, len(delta), _CHUNK):
        part = slice(at, at + _CHUNK)
        rounded = delta[part].view(torch.bfloat16)
        rounded.copy_(weights[part] - held[part])
        held[part].add_(rounded)


def add_delta(held: Tensor, delta: Tensor) -> None:
    """Go the way whose bits are `delta`, (slice,) int16, from `held`, (slice,) float32; in place."""
    for at in range(0, len(delta), _CHUNK):
        part = slice(at, at + _CHUNK)
        held[part].add_(delta[part].view(torch.bfloat16))


class Deltas(ABC):
    """A shard's end: what learners hold of its slice. `weights`, (slice,) float32, on the host, or a `SizedVector`."""

    def __init__(self, weights: Any) -> None:
        self._delta: Any = weights.in_half() if isinstance(weights, SizedVector) else torch.zeros(len(weights), dtype=torch.int16)

    def begin(self, weights: Any) -> None:  # noqa: B027 - where all hold the same, it must be known what
        """These are the first weights; nobody holds any."""

    def follow(self, weights: Any) -> None:  # noqa: B027 - as above
        """An update has made these."""

    def in_chunks(self) -> Common | None:
        """Itself, where all hold the same: what is sent can be made chunk by chunk, with the update."""
        return None

    @abstractmethod
    def kept(self, weights: Any) -> Any:
        """What must be known of a clock whose weights these are, to tell later what learners hold that were given it."""

    @abstractmethod
    def given(self, learner_id: int, kept: Any) -> Any:
        """A learner is given that clock: what it holds then."""

    @abstractmethod
    def answers(self, learner_ids: Sequence[int], weights: Any, clock: int) -> Iterator[tuple[list[int], Any]]:
        """What is sent to learners that are given these weights, of this clock; all that was sent before must have left.

        Yields learners, and the body that goes to them: the bits of d, or all of h, as int16; must have left before the next. But
        where answers leave at once, only what was sent to the same learner must have.
        """

    @abstractmethod
    def gone(self, learner_id: int) -> None:
        """A learner holds nothing any more."""

    def renew(self) -> None:
        """Go on in other memory: from the old one something may yet be sent, to a learner that hangs."""
        self._delta = _copied(self._delta)


class Common(Deltas):
    """All hold the same at a clock; h(c) is `held`."""

    held: Any

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self._clocks: dict[int, int] = {}
        self._followed = 0
        """Elements of the update that is being made."""

    def begin(self, weights: Any) -> None:
        self.held = _copied(weights)
        self._clocks.clear()

    def follow(self, weights: Any) -> None:
        if isinstance(weights, Tensor):
            advance(self.held, weights, self._delta)

    def in_chunks(self) -> Common:
        return self

    def open(self) -> None:
        """An update is about to be made, chunk by chunk; what was sent before must have left."""
        self._followed = 0

    def give(self, learner_ids: Sequence[int], clock: int) -> Any:
        """Learners that hold h(clock - 1) are given h(clock): the bits of d, which are still being made."""
        self._clocks.update(dict.fromkeys(learner_ids, clock))
        return _words(self._delta)

    def follow_chunk(self, weights: Any, chunk: Any) -> Any:
        """The next chunk of an update's weights is made: the bits of d for it."""
        if isinstance(chunk, SizedVector):
            return chunk.in_half()
        part = slice(self._followed, self._followed + chunk.size)
        self._followed = part.stop
        advance(self.held[part], weights[part], self._delta[part])
        return _words(self._delta[part])

    def kept(self, weights: Any) -> Any:
        return self.held

    def given(self, learner_id: int, kept: Any) -> Any:
        return kept

    def answers(self, learner_ids: Sequence[int], weights: Any, clock: int) -> Iterator[tuple[list[int], Any]]:
        near = [learner_id for learner_id in learner_ids if self._clocks.get(learner_id) == clock - 1]
        far = [learner_id for learner_id in learner_ids if self._clocks.get(learner_id) != clock - 1]
        self._clocks.update(dict.fromkeys(learner_ids, clock))
        if near:
            yield near, _words(self._delta)
        if far:
            yield far, _words(self.held)

    def gone(self, learner_id: int) -> None:
        self._clocks.pop(learner_id, None)

    def renew(self) -> None:
        super().renew()
        self.held = _copied(self.held)


class Each(Deltas):
    """What a learner holds is its own.

    `at_once`: answers leave while others are made (`duplex.py`), each from memory of its own: half a slice more for each learner.
    """

    def __init__(self, weights: Any, *, at_once: bool = False) -> None:
        super().__init__(weights)
        self._held: dict[int, Any] = {}
        self._ways: dict[int, Any] | None = {} if at_once else None

    def kept(self, weights: Any) -> Any:
        return weights

    def given(self, learner_id: int, kept: Any) -> Any:
        held = self._held.get(learner_id)
        if held is None:
            self._held[learner_id] = held = _copied(kept)
        elif isinstance(held, Tensor):
            advance(held, kept, self._way_to(learner_id))
        return held

    def _way_to(self, learner_id: int) -> Any:
        """Where the bits of a learner's d are made."""
        if self._ways is None:
            return self._delta
        if learner_id not in self._ways:
            self._ways[learner_id] = _copied(self._delta)
        return self._ways[learner_id]

    def answers(self, learner_ids: Sequence[int], weights: Any, clock: int) -> Iterator[tuple[list[int], Any]]:
        for learner_id in learner_ids:
            first = learner_id not in self._held
            held = self.given(learner_id, weights)
            yield [learner_id], _words(held if first else self._way_to(learner_id))

    def gone(self, learner_id: int) -> None:
        self._held.pop(learner_id, None)

    def renew(self) -> None:
        if self._ways is not None:  # each answer leaves from memory of its own
            return
        super().renew()
        self._held = {learner_id: _copied(held) for learner_id, held in self._held.items()}


def of_run(config: Config, protocol: Protocol, weights: Any) -> Deltas | None:
    """What learners hold of a shard's slice, as `Deltas` takes that; None where weights are pulled as they are."""
    if config.pull_format == "float32":
        return None
    return Common(weights) if protocol.consistent else Each(weights, at_once=config.both_ways or config.receive == "gathered")


class Held:
    """A learner's end: what it holds of each slice, and where what comes of it is received.

    Args:
        weights: (parameters,) float32 host memory, which it computes from; or, where only sizes travel, a `SizedVector`.
        bounds: the slice of each shard.
        apart: `weights` are moved between two pulls, by own steps: what it holds is kept beside them.

    Attributes:
        rooms: the memory for the answer of each shard, (2 slice,) int16: for all of h, or for d in its first half.
    """

    def __init__(self, weights: Any, bounds: Sequence[tuple[int, int]], *, apart: bool) -> None:
        slices = [weights[start:end] for start, end in bounds]
        self._nbytes = [each.nbytes for each in slices]
        if isinstance(weights, SizedVector):
            self.rooms: list[Any] = slices
            return
        self.rooms = [np.zeros(2 * len(each), np.int16) for each in slices]
        self._weights = [torch.from_numpy(each) for each in slices]
        self._held = [host_vector(len(each)) for each in slices] if apart else self._weights
        self._apart = apart

    def takes(self, shard: int, nbytes: int) -> bool:
        """Whether an answer that is not the first may be of this size."""
        return nbytes in (self._nbytes[shard], self._nbytes[shard] // 2)

    def take(self, shard: int, nbytes: int) -> None:
        """An answer of so many bytes is in its room: the weights are what is held now."""
        room = self.rooms[shard]
        if isinstance(room, SizedVector):
            return
        held, came = self._held[shard], torch.from_numpy(room)
        if nbytes == self._nbytes[shard]:
            held.copy_(came.view(torch.float32))
        else:
            add_delta(held, came[: len(held)])
        if self._apart:
            self._weights[shard].copy_(held)


def _copied(weights: Any) -> Any:
    return weights.clone() if isinstance(weights, Tensor) else weights


def _words(vector: Any) -> Any:
    """A vector as it is sent."""
    return host_view(vector.view(torch.int16)) if isinstance(vector, Tensor) else vector
