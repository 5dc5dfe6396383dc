"""A large slice of weights travels in chunks, each a body of its own: the first are on their way while the last are being made.

A chunk that has just been updated is also still in its core's cache when it is sent. Both ends cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

CHUNK_NBYTES = 2**21
"""Small enough for a slice of 4 MB to be two, large enough for what each costs besides its bytes, about 20 microseconds."""


def cuts(nbytes: int) -> Iterator[slice]:
    """The chunks of a float32 vector of so many bytes, in elements; at least one."""
    for start in range(0, max(1, nbytes // 4), CHUNK_NBYTES // 4):
        yield slice(start, min(start + CHUNK_NBYTES // 4, nbytes // 4))


def chunks_of(vector: Any) -> list[Any]:
    """A float32 vector as views of its chunks; where only its size travels, that in one."""
    return [vector[cut] for cut in cuts(vector.nbytes)] if isinstance(vector, np.ndarray | Tensor) else [vector]
