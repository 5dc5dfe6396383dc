"""Averaged weights: thetabar <- a thetabar + (1 - a) theta after each update [Chen16 Alg. 2, 4]."""

from __future__ import annotations

import torch
from torch import Tensor


class Average:
    """thetabar of one slice: `weights`, (slice,) float32.

    Args:
        weights: the initial ones, which are copied.
        decay: a.
        bias_correction: thetabar is the mean of the weights of all updates and not of the initial ones: after t updates
            (1 - a) sum of a^(t-k) theta_k, by 1 - a^t, which is to move by (1 - a) / (1 - a^t) of the way to each.
    """

    def __init__(self, weights: Tensor, decay: float, bias_correction: bool = False) -> None:
        self.weights = weights.clone()
        self._decay = decay
        self._share = 1.0 - decay
        """Share of the way to the new weights."""
        self._updates = torch.zeros(()) if bias_correction else None
        """Number of updates that it is the mean of, where that matters."""

    @classmethod
    def of(cls, weights: Tensor, decay: float, bias_correction: bool = False) -> Average | None:
        """None where the decay is 0: nothing is averaged."""
        return cls(weights, decay, bias_correction) if decay > 0 else None

    def begin(self) -> None:
        """An update is to be made."""
        if self._updates is not None:
            self._updates += 1
            self._share = (1.0 - self._decay) / (1.0 - self._decay ** self._updates.item())

    def follow(self, weights: Tensor, start: int, stop: int) -> None:
        """Take in the new weights, (slice,) float32, of which these elements are made."""
        self.weights[start:stop].lerp_(weights[start:stop], self._share)

    def state(self) -> dict[str, Tensor]:
        """As in `SliceUpdate.state`."""
        return {"averaged": self.weights} | ({} if self._updates is None else {"averages": self._updates})
