"""How much is tested: some of it by `make test`, all of it by `make test-all` (MPISGD_TESTS=all)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")

EVERYTHING = os.environ.get("MPISGD_TESTS") == "all"


def examples(most: int) -> int:
    """How many examples hypothesis draws of a property that takes long: all, or a twelfth of them."""
    return most if EVERYTHING else max(2, most // 12)


def thinned(items: Iterable[Item], step: int) -> Iterable[Item]:
    """All of what a test goes through, or each `step`-th: to be odd to what comes in turn."""
    return items if EVERYTHING else islice(items, 0, None, step)
