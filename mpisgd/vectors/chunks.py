"""Chunks of a large slice: the first travel while the last are made.

A fresh chunk is still in a core's cache. Both ends cut alike. Streamed chunks go from the last element on, as a backward pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mpisgd.vectors.flat import squared_norm

CHUNK_NBYTES = 2**21
"""Half of a 4 MB slice; large against a chunk's fixed cost, about 20 microseconds."""
# Both directions of a link are busy but while the first chunks come and the last leave; each chunk takes cores a while. Seconds of
# 44 MB: 4 nodes, 10 Gbit/s: 64 chunks 0.25, 24 0.22, 12 0.20, 8 and 5 0.19; 2.5 Gbit/s: 64 0.34, 24 0.32, 12 and 6 0.30; 1 Gbit/s:
# alike; 4 nodes and 2 spare ones, 0.5 Gbit/s: 26 1.18, 64 1.10.
FINE, COARSE = 64, 8
"""Chunks of the largest streamed slice, unless huge or tiny, over slow and over fast links."""
_LEAST_NBYTES = 2**17
_REGISTER_NBYTES = 64


def count_of(bounds: Sequence[tuple[int, int]], wanted: int) -> int:
    """Return the number of chunks of each streamed slice; `wanted`, unless huge or tiny."""
    largest = 4 * max(end - start for start, end in bounds)
    return -(-largest // min(CHUNK_NBYTES, max(_LEAST_NBYTES, -(-largest // wanted))))


def cuts(nbytes: int, count: int = 0) -> Iterator[slice]:
    """Yield the chunks of a float32 vector, in elements; at least one. Streamed: at most `count`, the last elements first."""
    chunk = -(-nbytes // (count * _REGISTER_NBYTES)) * _REGISTER_NBYTES if count else CHUNK_NBYTES
    starts = range(0, max(1, nbytes // 4), chunk // 4)
    for start in reversed(starts) if count else starts:
        yield slice(start, min(start + chunk // 4, nbytes // 4))


def parts_of(bounds: Sequence[tuple[int, int]], wanted: int) -> list[tuple[int, int]]:
    """Return the bounds of all chunks of streamed slices, ascending."""
    count = count_of(bounds, wanted)
    chunks = [(start, cut) for start, end in bounds for cut in reversed(list(cuts(4 * (end - start), count)))]
    return [(start + cut.start, start + cut.stop) for start, cut in chunks]


class Rest:
    """Elements `start` to `stop` of a vector, not done yet; done from either end."""

    __slots__ = ("start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop

    def meets(self, start: int, stop: int) -> bool:
        return max(start, self.start) < min(stop, self.stop)

    def take(self, start: int, stop: int) -> tuple[int, int]:
        """Return what is left of elements at an end, which are done now."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if start == self.start:
            self.start = stop
        else:
            self.stop = start
        return start, stop


def chunks_of(vector: Any) -> list[Any]:
    """Return views of a vector's chunks; a size stays whole."""
    return [vector[cut] for cut in cuts(vector.nbytes)] if isinstance(vector, np.ndarray | Tensor) else [vector]


def squared_norm_of_chunks(vector: np.ndarray | Tensor) -> float:
    """Return |vector|^2, as the sum over chunks; a GPU's vector is a single chunk."""
    if isinstance(vector, Tensor):
        return squared_norm(vector)
    return sum(squared_norm(vector[cut]) for cut in cuts(vector.nbytes))
