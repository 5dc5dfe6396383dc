"""Staleness rules: the weight of a gradient of staleness tau in the sum.

    none              1
    inverse           1/tau, and 1 at tau = 0               [Zhang16 eq. 3]
    inverse_plus_one  1/(tau + 1)
    exponential:B     exp(-B * tau)                         Chan and Lane 2014, named in [Zhang16 1]

or a user's function of (tau, clock), named `package.module:function`. The weight applies before the sum, hence before momentum;
the divisor counts gradients, not weights: alpha(tau) = alpha0 * weight [Zhang16 eq. 2].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import load_attribute
from mpisgd.rules.protocol_options import names_a_rule
from mpisgd.rules.verdict import APPLY, Kind, Verdict

Rule = Callable[[int, int], Any]
"""(tau, clock) -> weight, finite and >= 0."""


class Modulation:
    def __init__(self, name: str) -> None:
        """Find the rule. Raises ConfigError where there is none, or its weight at staleness 0 or 1 is invalid."""
        self._rule = _rule(name)
        self._named = f"protocol.modulation = {name!r}"
        self._by_clock = names_a_rule(name)
        self._known: dict[int, Verdict] = {}
        for staleness in (0, 1):
            self._weight(staleness, staleness)

    def applied(self, timestamp: int, clock: int) -> Verdict:
        """Return APPLY with the weight of staleness clock - timestamp."""
        staleness = clock - timestamp
        if self._by_clock:
            return _apply(self._weight(staleness, clock))
        verdict = self._known.get(staleness)
        if verdict is None:
            verdict = self._known[staleness] = _apply(self._weight(staleness, clock))
        return verdict

    def _weight(self, staleness: int, clock: int) -> float:
        said = self._rule(staleness, clock)
        try:
            weight = float(said)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 <= weight < math.inf:
            where = f"tau = {staleness}, clock = {clock}"
            raise ConfigError(f"{self._named}: weight {said!r} at {where}; expected a finite number >= 0")
        return weight


def _apply(weight: float) -> Verdict:
    return APPLY if weight == 1.0 else Verdict(Kind.APPLY, weight)


def _rule(name: str) -> Rule:
    match name:
        case "none":
            return lambda tau, clock: 1.0
        case "inverse":
            return lambda tau, clock: 1.0 / max(1, tau)
        case "inverse_plus_one":
            return lambda tau, clock: 1.0 / (tau + 1)
    kind, _, parameter = name.partition(":")
    if kind == "exponential":
        return _exponential(name, parameter)
    rule: Rule = load_attribute(name, "protocol.modulation")
    return rule


def _exponential(name: str, parameter: str) -> Rule:
    try:
        penalty = float(parameter)
    except ValueError:
        penalty = math.nan
    require(0 <= penalty < math.inf, "protocol.modulation", name, "exponential: and a finite number >= 0, e.g. exponential:0.1")
    return lambda tau, clock: math.exp(-penalty * tau)
