"""Checks of what a user wrote: each names the field, the value and what was expected (DESIGN 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpisgd.base.errors import ConfigError


def require(ok: bool, what: str, value: object, expected: str) -> None:
    """Raises ConfigError where not `ok`."""
    if not ok:
        raise ConfigError(f"{what} = {value!r}: expected {expected}")


def at_least(options: object, prefix: str, **least: float) -> None:
    """Refuse numbers below their least value, and those that are not finite."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None:
            require(math.isfinite(value) and value >= bound, f"{prefix}{name}", value, f"a finite number >= {bound}")


def at_least_each(table: Mapping[int, float], name: str, bound: float) -> None:
    """Check every value in a table of numbers, as `at_least` does."""
    for key, value in table.items():
        require(math.isfinite(value) and value >= bound, f"{name}[{key}]", value, f"a finite number >= {bound}")
