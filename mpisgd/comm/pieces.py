"""Pieces of a vector, small enough for MPI to send each at once.

Open MPI first asks whether a larger message's receive is posted; over TCP the answer queues behind all else (TRAPS 11). MPI stores
early pieces, so callers bound their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpisgd.comm.communicator import OpenMessage

NBYTES = 60 * 2**10
"""Below Open MPI's `btl_tcp_eager_limit`, 64 KiB with its own header."""


def cuts(start: int, end: int, itemsize: int) -> Iterator[slice]:
    size = NBYTES // itemsize
    for at in range(start, end, size):
        yield slice(at, min(at + size, end))


def of(vector: Any, start: int, end: int) -> Iterator[Any]:
    return (vector[piece] for piece in cuts(start, end, vector.itemsize))


def bodies(vectors: Any) -> tuple[Any, ...]:
    """Return bodies in pieces; a vector of which only the size travels stays whole."""
    found: list[Any] = []
    for vector in vectors:
        found += of(vector, 0, len(vector)) if hasattr(vector, "itemsize") else (vector,)
    return tuple(found)


class InPieces(OpenMessage):
    """An open message whose bodies leave in pieces."""

    def __init__(self, opened: OpenMessage) -> None:
        self._opened = opened

    def add(self, body: Any) -> None:
        for piece in bodies([body]):
            self._opened.add(piece)

    def close(self) -> Any:
        return self._opened.close()
