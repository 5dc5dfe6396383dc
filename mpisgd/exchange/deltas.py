"""Pulled weights as bfloat16: the rounded difference from the learner's weights, with error feedback.

A learner computes from h, float32. The shard, with weights w, knows h, and sends d:

    d = bfloat16(w - h), to nearest even        h = h + d, at both ends alike

The rounding error, at most 1/256 of the last change of h, stays in w - h: small updates survive.

    first pull     all of h = w, in float32, in each attempt
    Common         learners on the same clock of all shards hold the same h(c) = h(c-1) + d(c); after a missed clock all of h(c)
                   travels. A shard keeps another slice
    Each           otherwise h depends on the clocks given to a learner. A shard keeps a slice per learner

A hanging learner has had all earlier answers before its next request: its shard still knows h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.comm.communicator import Part, Team
from mpisgd.config import Config
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.memory import SizedVector, copy_of, host_vector, host_view

_CHUNK = 2**17
"""Elements per pass, to stay in the cache (`rounding.py`): torch widens a delta before adding (TRAPS 11)."""


def advance(held: Tensor, weights: Tensor, delta: Tensor) -> None:
    """Add the rounded `weights` - `held`, (slice,) float32, to `held`; write its bits to `delta`, (slice,) int16."""
    for at in range(0, len(delta), _CHUNK):
        part = slice(at, at + _CHUNK)
        rounded = delta[part].view(torch.bfloat16)
        rounded.copy_(weights[part] - held[part])
        held[part].add_(rounded)


def add_delta(held: Tensor, delta: Tensor) -> None:
    """Add bfloat16 bits `delta`, (slice,) int16, to `held`, (slice,) float32."""
    for at in range(0, len(delta), _CHUNK):
        part = slice(at, at + _CHUNK)
        held[part].add_(delta[part].view(torch.bfloat16))


class Deltas(ABC):
    """A shard's end: h of its slice for all learners. `weights`: (slice,) float32 on the host, or a `SizedVector`."""

    def __init__(self, weights: Any) -> None:
        self._delta: Any = weights.in_half() if isinstance(weights, SizedVector) else torch.zeros(len(weights), dtype=torch.int16)

    def begin(self, weights: Any) -> None:  # noqa: B027 - only `Common` has to know h from the start
        """Begin with these weights; no learner holds any."""

    def follow(self, weights: Any) -> None:  # noqa: B027 - as above
        """Follow an update to these weights."""

    def in_chunks(self) -> Common | None:
        """Return self where d can be made chunk by chunk, with the update: all learners hold the same h."""
        return None

    @abstractmethod
    def kept(self, weights: Any) -> Any:
        """Return a record of a clock's weights, for `given`."""

    @abstractmethod
    def given(self, learner_id: int, kept: Any) -> Any:
        """Give a learner the recorded clock; return the resulting h."""

    @abstractmethod
    def answers(self, learner_ids: Sequence[int], weights: Any, clock: int) -> Iterator[tuple[list[int], Any]]:
        """Yield learners with their body, the bits of d or all of h, as int16.

        All earlier bodies must have left; where answers leave at once, only those to the same learner.
        """

    @abstractmethod
    def gone(self, learner_id: int) -> None:
        """Forget a learner's h."""

    def renew(self) -> None:
        """Move to new memory: a send to a hanging learner may still read the old."""
        self._delta = copy_of(self._delta)


class Common(Deltas):
    """The same h for all learners; `held` is h(c)."""

    held: Any

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self._clocks: dict[int, int] = {}
        self._followed = 0

    def begin(self, weights: Any) -> None:
        self.held = copy_of(weights)
        self._clocks.clear()

    def follow(self, weights: Any) -> None:
        if isinstance(weights, Tensor):
            advance(self.held, weights, self._delta)

    def in_chunks(self) -> Common:
        return self

    def open(self) -> None:
        """Begin an update in chunks; earlier bodies must have left."""
        self._followed = 0

    def give(self, learner_ids: Sequence[int], clock: int) -> Any:
        """Give h(clock) to holders of h(clock - 1); return the bits of d, still being made."""
        self._clocks.update(dict.fromkeys(learner_ids, clock))
        return _words(self._delta)

    def follow_chunk(self, weights: Any, chunk: Any) -> Any:
        """Return the bits of d for the next chunk of weights."""
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
        self.held = copy_of(self.held)


class Each(Deltas):
    """A separate h for each learner.

    `at_once`: answers leave while others are made (`rounds.py`), from separate memory: half a slice more per learner.
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
            self._held[learner_id] = held = copy_of(kept)
        elif isinstance(held, Tensor):
            advance(held, kept, self._way_to(learner_id))
        return held

    def _way_to(self, learner_id: int) -> Any:
        if self._ways is None:
            return self._delta
        if learner_id not in self._ways:
            self._ways[learner_id] = copy_of(self._delta)
        return self._ways[learner_id]

    def answers(self, learner_ids: Sequence[int], weights: Any, clock: int) -> Iterator[tuple[list[int], Any]]:
        for learner_id in learner_ids:
            first = learner_id not in self._held
            held = self.given(learner_id, weights)
            yield [learner_id], _words(held if first else self._way_to(learner_id))

    def gone(self, learner_id: int) -> None:
        self._held.pop(learner_id, None)

    def renew(self) -> None:
        if self._ways is not None:  # answers have separate memory
            return
        super().renew()
        self._held = {learner_id: copy_of(held) for learner_id, held in self._held.items()}


def of_run(config: Config, protocol: Protocol, weights: Any) -> Deltas | None:
    if config.pull_format == "float32":
        return None
    return Common(weights) if protocol.consistent else Each(weights, at_once=config.ahead > 0 or config.way == "gathered")


class Held:
    """A learner's end: h of each slice.

    Args:
        weights: (parameters,) float32 host memory, or a `SizedVector`.
        apart: keep h beside `weights`, moved by own steps between two pulls.

    Attributes:
        rooms: memory for each shard's answer, (2 slice,) int16: all of h, or d in the first half.
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
        """Return whether an answer after the first may have this size."""
        return nbytes in (self._nbytes[shard], self._nbytes[shard] // 2)

    def take(self, shard: int, nbytes: int) -> None:
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


class Gathered:
    """All slices, gathered by learners that double as shards; `rounded`: h of `Common`.

    First all of h travels, then only the bits of d: a learner gets every clock. With buckets, d arrives while the rest is made.

    `weights`: (parameters,) float32 host memory, or a `SizedVector`.
    """

    def __init__(self, team: Team, weights: Any, slice_nbytes: int, *, rounded: bool) -> None:
        self._team = team
        self._weights = weights
        self._slice_nbytes = slice_nbytes
        self.rounded = rounded
        self._deltas: Any = None
        if rounded:
            self._deltas = weights.in_half() if isinstance(weights, SizedVector) else np.zeros(len(weights), np.int16)
        self._whole = True

    def share(self, own: Any) -> Any:
        """Begin to gather; `own`: weights; if rounded the bits of d, or all of h, as int16."""
        self._whole = own.nbytes == self._slice_nbytes
        if self.rounded and self._whole and not isinstance(own, SizedVector):
            own = own.view(np.float32)
        return self._team.share(own, self._weights if self._whole else self._deltas)

    def open(self, parts: Sequence[Part]) -> Any:
        self._whole = not self.rounded
        return self._team.open_shares(self._weights if self._whole else self._deltas, parts)

    def arrive(self, shared: Any, number: int) -> None:
        self._team.arrive(shared, number, None if self._whole else self._take)

    def finish(self, shared: Any, meanwhile: Callable[[], None]) -> None:
        self._team.finish(shared, meanwhile, None if self._whole else self._take)

    def _take(self, part: slice) -> None:
        if not isinstance(self._deltas, SizedVector):
            add_delta(torch.from_numpy(self._weights[part]), torch.from_numpy(self._deltas[part]))


def _words(vector: Any) -> Any:
    return host_view(vector.view(torch.int16)) if isinstance(vector, Tensor) else vector
