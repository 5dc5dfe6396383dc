"""Buckets of a gradient, sent during the backward pass of an allreduce.

Layers fill a bucket from the slice's end, as a backward pass goes. A larger layer comes at once and is cut: a bucket leaves while
the next is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.vectors.flat import Layer, bounds_of

# 17 ms at 1 Gbit/s: fixed costs vanish, and little is left after a pass. Twice the size takes a twentieth longer in a round of
# equal computing and exchange; half gains nothing.
BUCKET_NBYTES = 2**21
"""Least float32 bytes of a bucket, except a slice's first, the last to come; none has twice as many."""

OLDER_NBYTES = 2**22
"""Under rules before 4 (`records/log/schema.py`)."""


class Bucket(NamedTuple):
    """Elements `start` to `end`, summed by rank `owner` of the group.

    `first`: index of the first layer inside; its gradient comes last.
    """

    owner: int
    start: int
    end: int
    first: int


def buckets(layers: Sequence[Layer], slices: Sequence[tuple[int, int]], nbytes: int | None = None) -> list[Bucket]:
    """Cut the slices of these layers, in the vector's order."""
    ends = bounds_of([[layer] for layer in layers])
    size = max(1, (nbytes or BUCKET_NBYTES) // 4)
    found = []
    for owner, (start, end) in reversed(list(enumerate(slices))):
        stop = end
        for number, (begin, close) in reversed(list(enumerate(ends))):
            if begin >= stop or close <= start:
                continue
            at = max(begin, start)
            while stop - at >= 2 * size:
                found.append(Bucket(owner, stop - size, stop, number))
                stop -= size
            if at == start or stop - at >= size:
                found.append(Bucket(owner, at, stop, number))
                stop = at
            if at == start:
                break
    return found[::-1]
