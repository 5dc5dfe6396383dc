"""Parameters without a gradient in a backward pass: torch's `grad` is None, and optimisers pass over them.

Zeros differ: weights decay, momentum goes on, steps count. A learner sends runs of elements without a gradient. An update passes
over runs common to its gradients, as torch does for their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

Runs: TypeAlias = Any
"""Runs of elements: (runs, 2) int64, begin and end of each, ascending and apart."""

NOTHING: Runs = np.empty((0, 2), np.int64)


def runs_of(spans: Iterable[tuple[int, int]]) -> Runs:
    """Return the runs of ascending spans; neighbours merge."""
    found: list[list[int]] = []
    for start, end in spans:
        if start < end:
            if found and found[-1][1] == start:
                found[-1][1] = end
            else:
                found.append([start, end])
    return np.array(found, np.int64) if found else NOTHING


def within(runs: Runs, start: int, end: int) -> Runs:
    """Return the parts of runs in a slice, from its begin."""
    if not len(runs):
        return NOTHING
    return runs_of((max(first, start) - start, min(last, end) - start) for first, last in runs.tolist())


def joined(one: Runs, other: Runs) -> Runs:
    """Return the elements of either; the runs are apart."""
    return runs_of(sorted([*one.tolist(), *other.tolist()]))


def common(one: Runs, other: Runs) -> Runs:
    if not (len(one) and len(other)):
        return NOTHING
    found = []
    for start, end in one.tolist():
        found += [(start + first, start + last) for first, last in within(other, start, end).tolist()]
    return runs_of(found)


def between(runs: Runs, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a slice outside runs."""
    for first, last in runs.tolist():
        if start < min(first, end):
            yield start, min(first, end)
        start = max(start, last)
    if start < end:
        yield start, end


def why_not(runs: Runs, size: int) -> str:
    """Return why these are no runs of so many elements, or ""."""
    edges = runs.ravel()
    if not len(edges) or (0 <= edges[0] and edges[-1] <= size and (edges[1:] > edges[:-1]).all()):
        return ""
    return f"runs without a gradient from {edges.min()} to {edges.max()}: expected 0 ... {size}, ascending"
