"""Parameters of which a backward pass has computed no gradient: torch's `grad` is None, and its optimisers pass over them.

A gradient of zeros is another thing: it lets weights decay, momentum go on and steps be counted. So a learner tells with its
gradient the runs of elements that it has none of. An update passes over what none of its gradients has, as torch does over what the
backward pass of their mean has not come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

Runs: TypeAlias = Any
"""Runs of elements: (runs, 2) int64, the begin and the end of each, ascending and apart."""

NOTHING: Runs = np.empty((0, 2), np.int64)


def runs_of(spans: Iterable[tuple[int, int]]) -> Runs:
    """The runs of spans that ascend, and may be empty; neighbours become one."""
    found: list[list[int]] = []
    for start, end in spans:
        if start < end:
            if found and found[-1][1] == start:
                found[-1][1] = end
            else:
                found.append([start, end])
    return np.array(found, np.int64) if found else NOTHING


def within(runs: Runs, start: int, end: int) -> Runs:
    """The parts of runs that lie in a slice, counted from its begin."""
    if not len(runs):
        return NOTHING
    return runs_of((max(first, start) - start, min(last, end) - start) for first, last in runs.tolist())


def common(one: Runs, other: Runs) -> Runs:
    """The elements that are in runs of both."""
    if not (len(one) and len(other)):
        return NOTHING
    found = []
    for start, end in one.tolist():
        found += [(start + first, start + last) for first, last in within(other, start, end).tolist()]
    return runs_of(found)


def between(runs: Runs, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The spans of a slice that are in no run."""
    for first, last in runs.tolist():
        if start < min(first, end):
            yield start, min(first, end)
        start = max(start, last)
    if start < end:
        yield start, end


def why_not(runs: Runs, size: int) -> str:
    """Say why these can be no runs of so many elements; "" = they can."""
    edges = runs.ravel()
    if not len(edges) or (0 <= edges[0] and edges[-1] <= size and (edges[1:] > edges[:-1]).all()):
        return ""
    return f"runs without a gradient from {edges.min()} to {edges.max()}: expected 0 ... {size}, ascending"
