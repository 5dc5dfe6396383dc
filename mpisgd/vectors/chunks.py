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
