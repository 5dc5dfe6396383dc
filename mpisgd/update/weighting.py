"""What the weight of a stale gradient multiplies: the gradient in the sum, or the rate of the update that it goes into.

    gradient    theta <- theta - gamma opt(1/c sum w_i g_i)               [Zhang16 eq. 5]; before momentum
    rate        theta <- theta - gamma (1/c sum w_i) opt(1/c sum g_i)     [ElasticDL], whose updates are of one gradient: gamma w

where opt is what the optimiser makes of an averaged gradient. Of an update of several gradients the papers do not tell; the mean of
their weights is the rate at which plain SGD would go as far along gradients that are alike.
"""

from __future__ import annotations

from typing import Literal


class Weighting:
    """The weights of the gradients of the update in the making."""

    def __init__(self, of: Literal["gradient", "rate"] = "gradient") -> None:
        self._of_rate = of == "rate"
        self._total = 0.0
        self._gradients = 0

    def add(self, weight: float, gradients: int) -> float:
        """A gradient, or the sum of so many, has this weight; returns the factor that it goes into the sum with."""
        if not self._of_rate:
            return weight
        self._total += weight * gradients
        self._gradients += gradients
        return 1.0

    def take(self) -> float:
        """The factor of the update's rate; the next update begins."""
        factor = self._total / self._gradients if self._gradients else 1.0
        self._total, self._gradients = 0.0, 0
        return factor
