"""How much is tested: some by `make test`, all by `make test-all` (MPISGD_TESTS=all), of that what the first has not run, with a
sixth of the examples (rest), and, under a second MPI, all tests, but of runs that share a launch one per pattern of messages
(patterns)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")

EVERYTHING = os.environ.get("MPISGD_TESTS") in ("all", "rest")
REST = os.environ.get("MPISGD_TESTS") == "rest"
PATTERNS = os.environ.get("MPISGD_TESTS") == "patterns"


def examples(most: int, of: int = 24) -> int:
    """How many examples hypothesis draws of a property that takes long: all, a sixth (rest), or one in `of`."""
    return max(2, most // (6 if REST else 1 if EVERYTHING else of))


def thinned(items: Iterable[Item], step: int) -> Iterable[Item]:
    """All of what a test goes through, or each `step`-th: to be odd to what comes in turn."""
    return items if EVERYTHING else list(islice(items, 0, None, step))


def spread(cases: Iterable[Any], step: int, unpack: bool = False) -> list[Any]:
    """Parameters of a test whose rule others show, too: `make test` has each `step`-th, the rest are `slow`.

    `unpack`: each case is a tuple of several parameters.
    """
    given = (case if unpack else (case,) for case in cases)
    return [pytest.param(*case, marks=[pytest.mark.slow] if number % step else []) for number, case in enumerate(given)]


def tests_more(module: ModuleType) -> bool:
    """Whether tests of a module that `make test` has, too, have more examples where everything is tested."""
    return not {"EVERYTHING", "examples", "thinned", "drawn_jobs", "dealt"}.isdisjoint(vars(module))
