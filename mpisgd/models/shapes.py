"""Refusing an input that a network is not cut for."""

from __future__ import annotations

from mpisgd.base.errors import ConfigError


def require(ok: bool, model: str, found: tuple[int, ...], expected: str) -> None:
    """Raise ConfigError naming the model, the shape of an input, and what was expected, unless `ok`."""
    if not ok:
        raise ConfigError(f"model = {model!r}: inputs of shape {found}, expected {expected}")
