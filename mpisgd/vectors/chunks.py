"""Chunks of a large slice: the first travel while the last are made.

A fresh chunk is still in a core's cache. Both ends cut alike.

Gradients received at once, in chunks, within a window: memory holds a few chunks of each.

    header of a push         `begin`: post receives of the first chunks
    its turn                 `include` in the sum; `park` until then
    sum complete             `chunk`, once each: wait for all gradients, in order
    unwanted                 the next `begin` receives the rest

Without a window, acknowledgements for the other direction would queue behind a whole gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from mpisgd.vectors.flat import squared_norm
from mpisgd.vectors.memory import copy_into

CHUNK_NBYTES = 2**21
"""Half of a 4 MB slice; large against a chunk's fixed cost, about 20 microseconds."""

WINDOW = 3
"""Receives posted at once per gradient."""


def cuts(nbytes: int) -> Iterator[slice]:
    """Yield the chunks of a float32 vector, in elements; at least one."""
    for start in range(0, max(1, nbytes // 4), CHUNK_NBYTES // 4):
        yield slice(start, min(start + CHUNK_NBYTES // 4, nbytes // 4))


def chunks_of(vector: Any) -> list[Any]:
    """Return views of a vector's chunks; a size stays whole."""
    return [vector[cut] for cut in cuts(vector.nbytes)] if isinstance(vector, np.ndarray | Tensor) else [vector]


def squared_norm_of_chunks(vector: np.ndarray | Tensor) -> float:
    """Return |vector|^2, as the sum over chunks; a GPU's vector is a single chunk."""
    if isinstance(vector, Tensor):
        return squared_norm(vector)
    return sum(squared_norm(vector[cut]) for cut in cuts(vector.nbytes))


class Stream(ABC):
    @abstractmethod
    def post(self, room: Any) -> None:
        """Set the next chunk's destination."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the oldest chunk posted and not waited for."""


class Incoming:
    def __init__(self, stream: Stream, pieces: list[slice], window: list[Any]) -> None:
        self._stream = stream
        self._pieces = pieces
        self.window = window
        self._posted = self._taken = 0
        self._landed: Any = None
        for _ in window:
            self._post()

    def _post(self) -> None:
        if self._posted < len(self._pieces):
            self._stream.post(self._room(self._posted))
            self._posted += 1

    def _room(self, number: int) -> Any:
        piece = self._pieces[number]
        return self.window[number % len(self.window)][: piece.stop - piece.start]

    @property
    def is_whole(self) -> bool:
        return self._taken == len(self._pieces)

    def take(self) -> Any:
        """Wait for the next chunk, intact until `release`."""
        if self._landed is not None:
            return self._landed[self._pieces[self._taken]]
        self._stream.wait()
        return self._room(self._taken)

    def release(self) -> None:
        """Give back the taken chunk."""
        self._taken += 1
        if self._landed is None:
            self._post()

    def land(self, room: Callable[[int], Any]) -> None:
        """Receive the rest into new memory: the sender waits no more."""
        if self._landed is not None or self.is_whole:
            return
        landed, first = room(self._pieces[-1].stop), self._taken
        while not self.is_whole:
            copy_into(landed[self._pieces[self._taken]], self.take())
            self.release()
        self._landed, self._taken = landed, first

    def see_out(self) -> None:
        """Receive the rest for nothing."""
        while not self.is_whole:
            self.take()
            self.release()


class ChunkedReceive:
    """Incoming gradients of a slice, a channel's memory to receive into.

    Args:
        room: maker of memory for a number of elements.

    Attributes:
        nbytes: of a travelling gradient.
        pieces: chunks, in elements, as of the weights.
    """

    def __init__(self, size: int, room: Callable[[int], Any]) -> None:
        self.nbytes = size * room(1).nbytes
        self.pieces = list(cuts(4 * size))
        self._make_room = room
        self._free: list[list[Any]] = []
        self._held: Incoming | None = None
        self._parked: dict[int, Incoming] = {}
        self._included: list[Incoming] = []

    def begin(self, stream: Stream) -> Incoming:
        self.see_out()
        window = self._free.pop() if self._free else [self._make_room(self.pieces[0].stop) for _ in range(WINDOW)]
        self._held = incoming = Incoming(stream, self.pieces, window)
        return incoming

    def see_out(self) -> None:
        """Drop the last gradient, unless included or parked."""
        if self._held is not None:
            self._held.see_out()
            self._free.append(self._held.window)
            self._held = None

    def land(self, incoming: Incoming) -> None:
        """Keep a gradient whole: its sender can wait no longer."""
        incoming.land(self._make_room)

    def park(self, learner_id: int) -> None:
        self._parked[learner_id] = self._take_held()

    def unpark(self, learner_id: int) -> None:
        """Make a parked gradient the last."""
        self.see_out()
        self._held = self._parked.pop(learner_id)

    def include(self) -> None:
        self._included.append(self._take_held())

    def _take_held(self) -> Incoming:
        held, self._held = self._held, None
        assert held is not None
        return held

    def chunk(self) -> Iterator[Any]:
        """Yield the next chunk of each gradient in the sum, in order. Use each at once; iterate to the end."""
        for incoming in self._included:
            yield incoming.take()
            incoming.release()
        if self._included[-1].is_whole:
            self._free += [incoming.window for incoming in self._included]
            self._included = []
