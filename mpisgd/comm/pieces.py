"""Pieces of a vector, small enough for MPI to send each at once.

A message too large for Open MPI to send at once begins with a question whether its receive is posted. Over TCP two ranks have one
connection, and the answer waits behind all that goes the same way. Two nodes that exchange 22 MB each at 1 Gbit/s need 0.18 s.
Where one begins 20 ms later, whole messages, or some of 1 MiB, take up to 0.37, and pieces 0.20; where four nodes all exchange with
each other, 0.46 and 0.30.

A piece that comes before anybody receives it is kept by MPI: so whoever cuts bodies says how many may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NBYTES = 60 * 2**10
"""Below Open MPI's `btl_tcp_eager_limit`, 64 KiB with its own header."""


def cuts(start: int, end: int, itemsize: int) -> Iterator[slice]:
    """Elements `start` to `end` of a vector, piece by piece."""
    size = NBYTES // itemsize
    for at in range(start, end, size):
        yield slice(at, min(at + size, end))


def of(vector: Any, start: int, end: int) -> Iterator[Any]:
    """The same, as views of that vector."""
    return (vector[piece] for piece in cuts(start, end, vector.itemsize))


def bodies(vectors: Any) -> tuple[Any, ...]:
    """The bodies of a message that is made of these vectors, in pieces; a vector of which only the size travels stays whole."""
    found: list[Any] = []
    for vector in vectors:
        found += of(vector, 0, len(vector)) if hasattr(vector, "itemsize") else (vector,)
    return tuple(found)
