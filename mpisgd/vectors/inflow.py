"""Gradients that come in at once, each in chunks, within a window: memory for a few chunks of each, not for all of them whole.

    header of a push         `begin`: receives of its first chunks are posted
    its turn                 `include`: it is part of the sum; `park` until then
    all of a sum are here    `chunk`, once for each: it is waited for, of all gradients in the order in which they were included
    nobody wants it          the next that begins sees it out

The window is why chunks do not travel all at once: acknowledgements of what goes the other way, over the same connection, would
queue behind a whole gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from mpisgd.vectors.chunks import cuts
from mpisgd.vectors.memory import copy_into

WINDOW = 3
"""Chunks of a gradient whose receives are posted at once."""


class Stream(ABC):
    """A gradient that is under way, chunk by chunk."""

    @abstractmethod
    def post(self, room: Any) -> None:
        """Say where its next chunk is to go."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the chunk is there that was posted first, of those not yet waited for."""


class Incoming:
    """One gradient, while it comes in."""

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
        """Whether all of it was taken."""
        return self._taken == len(self._pieces)

    def take(self) -> Any:
        """Wait for its next chunk, which stays as it is until `release`."""
        if self._landed is not None:
            return self._landed[self._pieces[self._taken]]
        self._stream.wait()
        return self._room(self._taken)

    def release(self) -> None:
        """The chunk that was taken is used."""
        self._taken += 1
        if self._landed is None:
            self._post()

    def land(self, room: Callable[[int], Any]) -> None:
        """Receive all that is still to come, into memory of its own, so that its sender waits no more."""
        if self._landed is not None or self.is_whole:
            return
        landed, first = room(self._pieces[-1].stop), self._taken
        while not self.is_whole:
            copy_into(landed[self._pieces[self._taken]], self.take())
            self.release()
        self._landed, self._taken = landed, first

    def see_out(self) -> None:
        """Receive all that is still to come, for nothing."""
        while not self.is_whole:
            self.take()
            self.release()


class Inflow:
    """The gradients for one slice that are coming in; to a channel it is the memory that they are received into.

    Args:
        size: elements of the slice.
        room: makes memory for so many of them, as a communicator receives into it.

    Attributes:
        nbytes: of a gradient, as it travels.
        pieces: its chunks, in elements: those of the weights, whatever a gradient travels as.
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
        """A push has come; its first chunks may."""
        self.see_out()
        window = self._free.pop() if self._free else [self._make_room(self.pieces[0].stop) for _ in range(WINDOW)]
        self._held = incoming = Incoming(stream, self.pieces, window)
        return incoming

    def see_out(self) -> None:
        """Nothing is wanted of what has come last, if it is neither included nor parked."""
        if self._held is not None:
            self._held.see_out()
            self._free.append(self._held.window)
            self._held = None

    def land(self, incoming: Incoming) -> None:
        """Keep a gradient whole, as its sender can wait no longer."""
        incoming.land(self._make_room)

    def park(self, learner_id: int) -> None:
        """What has come last waits for its turn."""
        self._parked[learner_id] = self._take_held()

    def unpark(self, learner_id: int) -> None:
        """The turn of this one has come."""
        self.see_out()
        self._held = self._parked.pop(learner_id)

    def include(self) -> None:
        """What has come last is part of the sum in the making."""
        self._included.append(self._take_held())

    def _take_held(self) -> Incoming:
        held, self._held = self._held, None
        assert held is not None
        return held

    def chunk(self) -> Iterator[Any]:
        """The next chunk of each gradient of the sum, in the order in which they were included; each is to be used at once.

        It must be gone through to its end; after the last chunk another sum begins.
        """
        for incoming in self._included:
            yield incoming.take()
            incoming.release()
        if self._included[-1].is_whole:
            self._free += [incoming.window for incoming in self._included]
            self._included = []
