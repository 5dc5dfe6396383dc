"""Median and range of repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

Spread = Mapping[str, float]
"""median, min, max."""


def spread(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values)}


def over(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return ratios of neighbouring repetitions."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def show(value: Spread, digits: int = 2, factor: float = 1.0) -> str:
    middle, low, high = (value[key] * factor for key in ("median", "min", "max"))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
