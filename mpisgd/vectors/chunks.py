"""Chunks of a large slice: the first travel while the last are made.

A fresh chunk is still in a core's cache. Both ends cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from mpisgd.vectors.flat import squared_norm

CHUNK_NBYTES = 2**21
"""Half of a 4 MB slice; large against a chunk's fixed cost, about 20 microseconds."""
# Both directions of a link are busy but while the first chunks come and the last leave.
STREAMED = 26
"""Chunks of a streamed slice, unless that makes them larger than others, or tiny."""
_LEAST_NBYTES = 2**18
_STEP_NBYTES = 2**12


def cuts(nbytes: int, *, streamed: bool = False) -> Iterator[slice]:
    """Yield the chunks of a float32 vector, in elements; at least one."""
    chunk = CHUNK_NBYTES
    if streamed:
        chunk = min(chunk, max(_LEAST_NBYTES, -(-nbytes // (STREAMED * _STEP_NBYTES)) * _STEP_NBYTES))
    for start in range(0, max(1, nbytes // 4), chunk // 4):
        yield slice(start, min(start + chunk // 4, nbytes // 4))


def chunks_of(vector: Any) -> list[Any]:
    """Return views of a vector's chunks; a size stays whole."""
    return [vector[cut] for cut in cuts(vector.nbytes)] if isinstance(vector, np.ndarray | Tensor) else [vector]


def squared_norm_of_chunks(vector: np.ndarray | Tensor) -> float:
    """Return |vector|^2, as the sum over chunks; a GPU's vector is a single chunk."""
    if isinstance(vector, Tensor):
        return squared_norm(vector)
    return sum(squared_norm(vector[cut]) for cut in cuts(vector.nbytes))
