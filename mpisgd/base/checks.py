"""Checks of user input; errors name field, value and expectation (DESIGN 8)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mpisgd.base.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})")


def require(ok: bool, what: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{what} = {value!r}: expected {expected}")


def at_least(options: object, prefix: str, **least: float) -> None:
    """Refuse non-finite numbers and numbers below their bound; None passes."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None:
            require(math.isfinite(value) and value >= bound, f"{prefix}{name}", value, f"a finite number >= {bound}")


def below_one(options: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        require(value < 1, f"{prefix}{name}", value, "a number below 1")


def at_least_each(table: Mapping[int, float] | Mapping[str, float], name: str, bound: float) -> None:
    for key, value in table.items():
        require(math.isfinite(value) and value >= bound, f"{name}[{key}]", value, f"a finite number >= {bound}")


def expanded(path: str) -> str:
    """Expand `~` and environment variables as a shell does; keep unset ones."""
    found = os.path.expandvars(path)
    return str(Path(found).expanduser()) if found.startswith("~") else found


def require_set(field: str, path: Path) -> None:
    """Raise ConfigError if a path still names a variable."""
    if unset := _VARIABLE.search(str(path)):
        named = unset[1] or unset[2]
        raise ConfigError(
            f"{field} = {str(path)!r}: the environment variable {named} is not set here: expected a set variable, or a path"
        )
