"""Gradients that have come, or come, to a slice: bodies, and the memory for them.

    header of a push     `Pool.take`, or `ChunkPool.begin`
    all there            `Body.arrive`: valid, and float32; of one in chunks, nothing yet
    before its turn      kept with its push
    in a sum             `adopt`: the sum is made in it; else `chunk`, and `release`
    dropped              `release`

A gradient in chunks comes within a window: memory holds a few of its chunks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import PeerError
from mpisgd.vectors.chunks import cuts, squared_norm_of_chunks
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import as_tensor, host_vector, view_of, wait_for
from mpisgd.vectors.push_format import FLOAT32, PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs, why_not

PARKED_NBYTES = 2**30
"""Limit for gradients before their turn."""

WINDOW = 3
"""Least receives posted at once per gradient."""
# In virtual time 30 learners of unequal seconds, at four shards of 11 MB: 0.87 of whole's speed with 3 receives, 0.95 with these.
_WINDOW_NBYTES = 6 * 2**20
"""Bytes of a gradient posted before others begin."""

Sum: TypeAlias = tuple[Tensor, Any]
"""(slice,) float32, and its view."""


class Body:
    """A gradient; here its size alone.

    Attributes:
        memory: to receive into, as it travels.
        vector, view: (slice,) float32, from `arrive` on.
        squared: |vector|^2, if known.
        skipped: elements of the last chunk without a gradient.
    """

    __slots__ = ("memory", "squared", "vector", "view")

    owned = True
    """The body is whole, and may hold the sum; otherwise chunks come."""
    skipped: Runs = NOTHING

    vector: Any
    view: Any

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.squared: float | None = None

    def arrive(self, runs: Runs) -> str:
        """Make the received gradient float32; return why it is invalid, or ""."""
        return ""

    def is_finite(self) -> bool:
        return True

    def adopt(self) -> tuple[Tensor, Any, list[Sum] | None]:
        """Hand over vector and view, and where these return."""
        return self.vector, self.view, None

    def chunk(self, cut: slice) -> Any:
        """Return the elements of a chunk, once there; in order."""
        return self.memory

    def release(self, used: int | None = None) -> None:
        """Give memory back: so many elements are used, or it is unwanted."""

    def lose(self) -> None:
        """Never use the memory again: MPI may yet write into it."""


class Pool:
    """Memory for bodies; here their size alone.

    Attributes:
        nbytes: of a travelling gradient.
        has_room: another body fits before its turn.
    """

    has_room: Any = True

    def __init__(self, memory: Any) -> None:
        self.nbytes: int = memory.nbytes
        self._only = Body(memory)

    def take(self) -> Body:
        return self._only

    def at(self, memory: Any) -> Body:
        """Return a lasting body in this memory, which stays the caller's."""
        return self._only

    def row(self, count: int) -> tuple[Any, list[Body]]:
        """Return memory for bodies received at once, and these, lasting."""
        return self._only.memory.times(count), [self._only] * count


class Whole(Body):
    """A gradient in the memory of a `WholePool`, received whole.

    Args:
        came: memory to receive into, if apart from the vector.
        lasts: memory is not the pool's, but for vectors of what comes apart.
    """

    __slots__ = ("_came", "_counted", "_lasts", "_pool")

    def __init__(
        self, pool: WholePool, came: Tensor | None, vector: Tensor | None = None, view: Any = None, lasts: bool = False
    ) -> None:
        self._pool = pool
        self._came = came
        self._lasts = lasts
        self._counted = not lasts
        self.vector, self.view = vector, view
        self.memory = view if came is None else view_of(came)
        self.squared = None

    def arrive(self, runs: Runs) -> str:
        self.squared = None
        pool, came = self._pool, self._came
        why = why_not(runs, pool.size)
        if came is None or why or (why := pool.format.why_not(came, pool.size)):
            return why
        self.vector, self.view = pool.vector()
        pool.widen(came, self.vector, lasts=self._lasts)
        if not self._lasts:
            self._came = None
        return ""

    def is_finite(self) -> bool:
        self.squared = squared = squared_norm_of_chunks(self.view)
        return math.isfinite(squared) or is_finite(self.view)

    def adopt(self) -> tuple[Tensor, Any, list[Sum] | None]:
        self._discount()
        handed = self.vector, self.view, self._pool.free if self._pooled else None
        if self._pooled:
            self.vector = None
        return handed

    def chunk(self, cut: slice) -> Any:
        return self.vector if cut.stop - cut.start == self._pool.size else self.vector[cut]

    def release(self, used: int | None = None) -> None:
        if used is not None and used < self._pool.size:
            return
        self._discount()
        if self.vector is None:
            if self._came is not None and not self._lasts:
                self._pool.put_apart(self._came)
                self._came = None
        elif self._pooled:
            self._pool.free.append((self.vector, self.view))
            self.vector = None

    def lose(self) -> None:
        self._discount()
        self.vector = self._came = None

    @property
    def _pooled(self) -> bool:
        """The vector is the pool's."""
        return self._came is not None or not self._lasts

    def _discount(self) -> None:
        if self._counted:
            self._counted = False
            self._pool.out -= 1


class WholePool(Pool):
    """Memory beside a slice's weights.

    Attributes:
        out: bodies taken, and neither adopted nor given back.
        free: vectors, the last given back first: it may still be in the cache.
        made: number of vectors ever made.
    """

    def __init__(self, weights: Tensor, push_format: PushFormat = FLOAT32) -> None:
        self.size = len(weights)
        self.format = push_format
        self.out = self.made = 0
        self.free: list[Sum] = []
        self._like = weights.new_empty(0)
        self._on_gpu = self._waits = weights.device.type == "cuda"
        """Memory to receive into lies on the GPU: its earlier work must be over."""
        coded = push_format.inbox(weights)
        self._travels = self._like if coded is None else coded.new_empty(0)
        """Type and device of travelling elements."""
        self._words = self.size if coded is None else len(coded)
        self._apart: list[Tensor] = []
        self._comes_apart = coded is not None
        self.nbytes = self._words * self._travels.element_size()

    @property
    def has_room(self) -> bool:
        return (self.out + 1) * 4 * self.size <= PARKED_NBYTES

    def take(self) -> Body:
        self.out += 1
        body = Whole(self, self._take_apart()) if self._comes_apart else Whole(self, None, *self.vector())
        if self._waits:
            wait_for(self._like)
        return body

    def at(self, memory: Any) -> Body:
        return self._lasting(as_tensor(memory))

    def row(self, count: int) -> tuple[Any, list[Body]]:
        room = self._space(count * self._words)
        return view_of(room), [self._lasting(part) for part in torch.split(room, self._words)]

    def vector(self) -> Sum:
        if self.free:
            return self.free.pop()
        self.made += 1
        vector = self._like.new_zeros(self.size) if self._on_gpu else host_vector(self.size)
        return vector, view_of(vector)

    def widen(self, came: Tensor, vector: Tensor, *, lasts: bool) -> None:
        """Make what came float32; take the memory back, unless it lasts."""
        self.format.widen(came, vector)
        if not lasts:
            self.put_apart(came)

    def put_apart(self, came: Tensor) -> None:
        self._apart.append(came)

    def _take_apart(self) -> Tensor:
        return self._apart.pop() if self._apart else self._space(self._words)

    def _space(self, words: int) -> Tensor:
        return self._travels.new_zeros(words) if self._comes_apart or self._on_gpu else host_vector(words)

    def _lasting(self, part: Tensor) -> Body:
        if self._comes_apart:
            return Whole(self, part, lasts=True)
        return Whole(self, None, part, view_of(part), lasts=True)


class Stream(ABC):
    @abstractmethod
    def post(self, room: Any) -> None:
        """Set the next chunk's destination."""

    @abstractmethod
    def wait(self) -> Runs:
        """Wait for the oldest chunk posted and not waited for; return its elements without a gradient."""

    def end(self) -> None:  # noqa: B027 - only messages have anything behind the last chunk
        """Wait for what follows the last chunk."""


class Incoming(Body):
    """A gradient that comes in chunks."""

    __slots__ = ("_apart", "_landed", "_pool", "_posted", "_stream", "_taken", "_waited", "_window", "skipped")

    owned = False

    def __init__(self, pool: ChunkPool, stream: Stream) -> None:
        self.skipped = NOTHING
        self._pool = pool
        self._stream = stream
        self._window = pool.window()
        self._posted = self._waited = self._taken = 0
        self._landed: Any = None
        self._apart = len(pool.pieces)
        for _ in self._window:
            self._post()

    def _post(self) -> None:
        if self._posted < len(self._pool.pieces):
            self._stream.post(self._room(self._posted))
            self._posted += 1

    def _room(self, number: int) -> Any:
        piece = self._pool.pieces[number]
        if number >= self._apart:
            return self._landed[piece]
        return self._window[number % len(self._window)][: piece.stop - piece.start]

    @property
    def is_whole(self) -> bool:
        return self._taken == len(self._pool.pieces)

    def arrive(self, runs: Runs) -> str:
        return why_not(runs, self._pool.size)

    def chunk(self, cut: slice) -> Any:
        self._wait(self._taken + 1)
        return self._pool.widened(self._room(self._taken))

    def _wait(self, count: int) -> None:
        while self._waited < count:
            self.skipped = self._stream.wait()
            if why := why_not(self.skipped, self._pool.size):
                raise PeerError(why)
            self._waited += 1
            if self._waited == len(self._pool.pieces):
                self._stream.end()

    def release(self, used: int | None = None) -> None:
        if used is None:
            self.land()
            return
        self._taken += 1
        self._post()
        if self.is_whole:
            self._pool.free.append(self._window)

    def land(self) -> None:
        """Post all receives, into new memory, and wait for none."""
        if self._posted == len(self._pool.pieces):
            return
        self._landed, self._apart = self._pool.room(self._pool.size), self._posted
        while self._posted < len(self._pool.pieces):
            self._post()

    def settle(self) -> None:
        """Wait for all posted chunks."""
        self._wait(self._posted)


class ChunkPool(Pool):
    """Memory for a few chunks of each gradient, a slice's or its size.

    Args:
        count: of chunks, as in `cuts`.
        room: maker of memory for a number of elements.

    Attributes:
        pieces: chunks, in elements, as of the weights.
    """

    def __init__(self, size: int, count: int, room: Callable[[int], Any], push_format: PushFormat = FLOAT32) -> None:
        self.size = size
        self.nbytes = size * room(1).nbytes
        self.pieces = list(cuts(4 * size, count))
        self._largest = self.pieces[-1].stop
        self._rooms = min(len(self.pieces), max(WINDOW, _WINDOW_NBYTES // max(1, 4 * self._largest)))
        self.room = room
        self.free: list[list[Any]] = []
        self._format = push_format
        self._wide: Tensor | None = None

    @classmethod
    def of(cls, size: int, count: int, push_format: PushFormat) -> ChunkPool:
        """Return a pool on the host."""
        word = np.float32 if push_format.name == FLOAT32.name else np.int16
        return cls(size, count, lambda elements: np.zeros(elements, word), push_format)

    def begin(self, stream: Stream) -> Incoming:
        return Incoming(self, stream)

    def window(self) -> list[Any]:
        return self.free.pop() if self.free else [self.room(self._largest) for _ in range(self._rooms)]

    def widened(self, came: Any) -> Any:
        """Return float32 elements, intact until the next; a size as it is."""
        if not isinstance(came, np.ndarray):
            return came
        words = torch.from_numpy(came)
        if self._format.name == FLOAT32.name:
            return words
        if self._wide is None or len(self._wide) < len(words):
            self._wide = host_vector(len(words))
        wide = self._wide[: len(words)]
        self._format.widen(words, wide)
        return wide
