"""Formats of a travelling slice of a gradient, and the way back to float32.

float32    unchanged
bfloat16   bits of rounded elements, as int16 (`rounding.py`)
topk       the k = ceil(share n) largest of n elements: (2 k,) int32, ascending indices, then bits of float32 values
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpisgd.config import Config
from mpisgd.vectors.memory import SizedVector


@dataclass(frozen=True)
class PushFormat:
    """A format; `share` is topk's."""

    name: str = "float32"
    share: float = 0.0

    @classmethod
    def of(cls, config: Config) -> PushFormat:
        return cls(config.push_format, config.topk_share)

    def words(self, size: int) -> int:
        return 2 * math.ceil(self.share * size) if self.name == "topk" else size

    def cuts(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        ends = np.cumsum([0, *(self.words(end - start) for start, end in bounds)]).tolist()
        return list(zip(ends, ends[1:], strict=False))

    def sized(self, vector: SizedVector) -> SizedVector:
        return vector.in_half() if self.name == "bfloat16" else SizedVector(self.words(vector.size))

    def inbox(self, weights: Tensor) -> Tensor | None:
        """Return memory to receive a slice beside the weights; None for float32."""
        if self.name == "float32":
            return None
        kind = torch.int16 if self.name == "bfloat16" else torch.int32
        return torch.zeros(self.words(len(weights)), dtype=kind, device=weights.device)

    def widen(self, came: Tensor, into: Tensor) -> None:
        """Write `came` to `into`, (slice,) float32."""
        if self.name == "bfloat16":
            came = came.view(torch.bfloat16)
        if self.name != "topk":
            into.copy_(came)
            return
        indices, values = came.view(2, -1)
        into.zero_()
        into[indices.long()] = values.view(torch.float32)

    def why_not(self, came: Tensor, size: int) -> str:
        """Return why this is no slice of `size` elements, or ""."""
        if self.name != "topk":
            return ""
        indices = came[: len(came) // 2].numpy()
        if indices[0] >= 0 and indices[-1] < size and (indices[1:] > indices[:-1]).all():
            return ""
        return f"indices from {indices.min()} to {indices.max()}: expected 0 ... {size - 1}, ascending"


FLOAT32, BFLOAT16 = PushFormat(), PushFormat("bfloat16")
