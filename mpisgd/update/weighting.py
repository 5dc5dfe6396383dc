"""Effect of a stale gradient's weight: on the gradient in the sum, or on the update's rate.

    gradient    theta <- theta - gamma opt(1/c sum w_i g_i)               [Zhang16 eq. 5]; before momentum
    rate        theta <- theta - gamma (1/c sum w_i) opt(1/c sum g_i)     [ElasticDL], for single gradients: gamma w

opt is the optimiser's step. For several gradients the papers say nothing; the mean weight moves plain SGD as far, if gradients are
alike.
"""

from __future__ import annotations

from typing import Literal


class Weighting:
    def __init__(self, of: Literal["gradient", "rate"] = "gradient") -> None:
        self._of_rate = of == "rate"
        self._total = 0.0
        self._gradients = 0

    def add(self, weight: float, gradients: int) -> float:
        """Note the weight of a gradient, or of a sum of several; return the factor in the sum."""
        if not self._of_rate:
            return weight
        self._total += weight * gradients
        self._gradients += gradients
        return 1.0

    def take(self) -> float:
        """Return the rate's factor, and begin the next update."""
        factor = self._total / self._gradients if self._gradients else 1.0
        self._total, self._gradients = 0.0, 0
        return factor
