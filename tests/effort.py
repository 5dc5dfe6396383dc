"""How much is tested: some of it by `make test`, all of it by `make test-all` (MPISGD_TESTS=all)."""

from __future__ import annotations

import os

EVERYTHING = os.environ.get("MPISGD_TESTS") == "all"


def examples(most: int) -> int:
    """How many examples hypothesis draws of a property that takes long: all, or a fifth of them."""
    return most if EVERYTHING else max(2, most // 5)
