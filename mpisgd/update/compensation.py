"""Delay compensation, DC-ASGD: a stale gradient, corrected towards the gradient at present weights.

[Zheng17] Zheng, Meng, Wang, Chen, Yu, Ma, Liu: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017
(arXiv:1609.08326). Algorithm 2, eq. 10, for a gradient g computed at theta_bak:

    g  <-  g + lambda_t * g * g * (theta - theta_bak)             elementwise
    DC-ASGD-c:  lambda_t = lambda_0
    DC-ASGD-a:  lambda_t = lambda_0 / sqrt(v + 1e-7),   v <- m v + (1 - m) g * g

Correction precedes staleness weighting, sum and momentum. A shard keeps a slice per clock in use by learners.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-7


class Compensation:
    """Weights given to learners.

    Args:
        weights: (slice,) float32, present weights, changed in place.
        strength: lambda_0.
        memory: m of DC-ASGD-a; 0 = DC-ASGD-c.
    """

    def __init__(self, weights: Tensor, strength: float, memory: float) -> None:
        self._weights = weights
        self._strength = strength
        self._memory = memory
        self._copies: dict[int, Tensor] = {}
        self._users: dict[int, set[int]] = {}
        self._clock_of: dict[int, int] = {}
        self._term = torch.empty_like(weights)
        self._mean_square = torch.zeros_like(weights) if memory > 0 else None
        self._before = torch.zeros_like(weights) if memory > 0 else None

    def move(self, weights: Tensor) -> None:
        self._weights = weights

    def given(self, learner_id: int, clock: int, weights: Tensor | None = None) -> None:
        """Note that a learner has weights of `clock`, by default the present."""
        if self._clock_of.get(learner_id) != clock:
            self.gone(learner_id)  # first: never more than lambda copies
            self._clock_of[learner_id] = clock
        if clock not in self._copies:
            self._copies[clock] = (self._weights if weights is None else weights).clone()
            self._users[clock] = set()
        self._users[clock].add(learner_id)

    def gone(self, learner_id: int) -> None:
        clock = self._clock_of.pop(learner_id, None)
        if clock is not None:
            self._users[clock].discard(learner_id)
            if not self._users[clock]:
                del self._users[clock], self._copies[clock]

    def state(self, summing: bool = False) -> dict[str, Tensor]:
        """Return v of DC-ASGD-a, (slice,) float32, not copied.

        `summing`: v as of the last update.
        """
        if self._mean_square is None or self._before is None:
            return {}
        return {"compensation": self._before if summing else self._mean_square}

    def compensate(self, gradient: Tensor, timestamp: int, first: bool = True) -> None:
        """Correct a gradient in place, (slice,) float32, computed at the weights of `timestamp`.

        `first`: of an update's sum.
        """
        term = torch.sub(self._weights, self._copies[timestamp], out=self._term).mul_(gradient).mul_(gradient)
        if self._mean_square is not None and self._before is not None:
            if first:  # into the other buffer: the last update's state stays
                self._mean_square, self._before = self._before, self._mean_square
                torch.mul(self._before, self._memory, out=self._mean_square)
            else:
                self._mean_square.mul_(self._memory)
            self._mean_square.addcmul_(gradient, gradient, value=1.0 - self._memory)
            term.div_((self._mean_square + _EPSILON).sqrt_())
        gradient.add_(term, alpha=self._strength)
