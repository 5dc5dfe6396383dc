"""Delay compensation, DC-ASGD: a stale gradient, corrected towards the one at the present weights.

[Zheng17] Zheng, Meng, Wang, Chen, Yu, Ma, Liu: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017
(arXiv:1609.08326). Algorithm 2, eq. 10, for a gradient g that was computed at the weights theta_bak:

    g  <-  g + lambda_t * g * g * (theta - theta_bak)             elementwise
    DC-ASGD-c:  lambda_t = lambda_0
    DC-ASGD-a:  lambda_t = lambda_0 / sqrt(v + 1e-7),   v <- m v + (1 - m) g * g

It happens before the gradient is weighted by its staleness and summed, and so before momentum. The shard must know what each
learner was given: it keeps a copy of its slice for each clock that a learner still computes from, so up to lambda copies; those
who were given the same clock share one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-7


class Compensation:
    """The weights that learners were given, and what they are needed for.

    Args:
        weights: (slice,) float32, the present weights, which change in place.
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
        """The mean square as of the last update."""

    def move(self, weights: Tensor) -> None:
        self._weights = weights

    def given(self, learner_id: int, clock: int, weights: Tensor | None = None) -> None:
        """A learner was given the weights of `clock`: the present ones, unless others are passed."""
        if self._clock_of.get(learner_id) != clock:
            self.gone(learner_id)  # first, so that there are never more than lambda copies
            self._clock_of[learner_id] = clock
        if clock not in self._copies:
            self._copies[clock] = (self._weights if weights is None else weights).clone()
            self._users[clock] = set()
        self._users[clock].add(learner_id)

    def gone(self, learner_id: int) -> None:
        """A learner needs the weights that it was given before no more."""
        clock = self._clock_of.pop(learner_id, None)
        if clock is not None:
            self._users[clock].discard(learner_id)
            if not self._users[clock]:
                del self._users[clock], self._copies[clock]

    def state(self, summing: bool = False) -> dict[str, Tensor]:
        """State that outlives the gradients under way: v of DC-ASGD-a, (slice,) float32, not copied.

        `summing`: as it was before the sum in the making, of which something was corrected.
        """
        if self._mean_square is None or self._before is None:
            return {}
        return {"compensation": self._before if summing else self._mean_square}

    def compensate(self, gradient: Tensor, timestamp: int, first: bool = True) -> None:
        """Correct a gradient, (slice,) float32, in place, that was computed at the weights of `timestamp`.

        `first`: of the sum for an update.
        """
        term = torch.sub(self._weights, self._copies[timestamp], out=self._term).mul_(gradient).mul_(gradient)
        if self._mean_square is not None and self._before is not None:
            if first:  # into the other buffer, so that the state at the last update stays
                self._mean_square, self._before = self._before, self._mean_square
                torch.mul(self._before, self._memory, out=self._mean_square)
            else:
                self._mean_square.mul_(self._memory)
            self._mean_square.addcmul_(gradient, gradient, value=1.0 - self._memory)
            term.div_((self._mean_square + _EPSILON).sqrt_())
        gradient.add_(term, alpha=self._strength)
