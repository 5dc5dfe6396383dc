"""Checks of what a user wrote: each names the field, the value and what was expected (DESIGN 8)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mpisgd.base.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})")


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


def at_least_each(table: Mapping[int, float] | Mapping[str, float], name: str, bound: float) -> None:
    """Check every value in a table of numbers, as `at_least` does."""
    for key, value in table.items():
        require(math.isfinite(value) and value >= bound, f"{name}[{key}]", value, f"a finite number >= {bound}")


def expanded(path: str) -> str:
    """Expand `~` and variables of the environment in a path, as a shell does; a variable that is not set stays as it is."""
    found = os.path.expandvars(path)
    return str(Path(found).expanduser()) if found.startswith("~") else found


def require_set(field: str, path: Path) -> None:
    """Raises ConfigError where a path still has a variable of the environment."""
    if unset := _VARIABLE.search(str(path)):
        named = unset[1] or unset[2]
        raise ConfigError(
            f"{field} = {str(path)!r}: the environment variable {named} is not set here, expected that it is, or a path"
        )
