"""Averaged weights: thetabar <- a thetabar + (1 - a) theta after each update [Chen16 Alg. 2, 4]."""

from __future__ import annotations

import torch
from torch import Tensor


class Average:
    """thetabar of a slice: `weights`, (slice,) float32.

    Args:
        weights: initial weights, copied.
        decay: a.
        bias_correction: leave the initial weights out: (1 - a) sum of a^(t-k) theta_k, by 1 - a^t, after t updates.
    """

    def __init__(self, weights: Tensor, decay: float, bias_correction: bool = False) -> None:
        self.weights = weights.clone()
        self._decay = decay
        self._share = 1.0 - decay
        """Share of the way to the new weights."""
        self._updates = torch.zeros(()) if bias_correction else None
        """Updates averaged, for the bias correction."""

    @classmethod
    def of(cls, weights: Tensor, decay: float, bias_correction: bool = False) -> Average | None:
        """Return None if the decay is 0."""
        return cls(weights, decay, bias_correction) if decay > 0 else None

    def begin(self) -> None:
        if self._updates is not None:
            self._updates += 1
            self._share = (1.0 - self._decay) / (1.0 - self._decay ** self._updates.item())

    def follow(self, weights: Tensor, start: int, stop: int) -> None:
        """Move these elements towards new weights, (slice,) float32."""
        self.weights[start:stop].lerp_(weights[start:stop], self._share)

    def state(self) -> dict[str, Tensor]:
        return {"averaged": self.weights} | ({} if self._updates is None else {"averages": self._updates})
