"""Parts of a gradient that leave one by one, while the rest of the backward pass of an allreduce is computed.

A bucket is contiguous, and of one rank's slice. It has layers until they are of BUCKET_NBYTES, from the end of the slice on, as a
backward pass goes. A larger layer, whose gradient is there all at once, is cut: one bucket leaves while the next one is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.vectors.flat import Layer, bounds_of

BUCKET_NBYTES = 2**21
"""Least bytes of float32 in one, but for the first of a slice, which comes last; none has twice as many. 17 ms at 1 Gbit/s, so that
what each costs besides its bytes does not count, and what is left when a pass ends is little of a large model. Twice as many take a
twentieth more of a round in which computing is as long as the exchange; half as many gain nothing."""

OLDER_NBYTES = 2**22
"""In runs of rules before the fourth (`records/log/schema.py`)."""


class Bucket(NamedTuple):
    """Elements `start` to `end` of the vector, which the rank in place `owner` sums.

    `first`: the number of the first layer that it has a part of, whose gradient is the last that it waits for.
    """

    owner: int
    start: int
    end: int
    first: int


def buckets(layers: Sequence[Layer], slices: Sequence[tuple[int, int]], nbytes: int | None = None) -> list[Bucket]:
    """Cut the slices of a vector of these layers, in the order of the vector; `nbytes`: in the place of BUCKET_NBYTES."""
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
