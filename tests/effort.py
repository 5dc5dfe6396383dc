"""How much is tested (MPISGD_TESTS): `some` by `make test`; in CI also the `rest`: tests marked `slow`, and once more tests marked
`deeper`, with a sixth of their examples; under a second MPI `patterns`: of runs that share a launch one per pattern of messages;
`all` by `make test-all`, tests marked `rare` among them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from itertools import islice
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
    """Return all items that a test goes through, each `step`-th, or (rest) thrice as many: odd to what comes in turn."""
    return items if EVERYTHING and not REST else list(islice(items, 0, None, max(1, step // 3) if REST else step))


def spread(cases: Iterable[Any], step: int, unpack: bool = False) -> list[Any]:
    """Return parameters of a test whose rule others show, too: `make test` has each `step`-th, CI each third of the others.

    `unpack`: each case is a tuple of several parameters.
    """
    given = [case if unpack else (case,) for case in cases]
    others = itertools.count()
    return [pytest.param(*case, marks=_LATER[next(others) % 3 > 0] if number % step else []) for number, case in enumerate(given)]


_LATER = {False: [pytest.mark.slow], True: [pytest.mark.slow, pytest.mark.rare]}
