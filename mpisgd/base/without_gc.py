"""Imports without Python's garbage collector, which only costs time there: it looks for cycles among all objects, again and
again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Nothing in this block makes cycles that matter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Imports in this block make some 300,000 objects that stay for ever: looked at while they are made, they take a fifth longer.

    Nor are they looked at afterwards: a full collection would stop a training rank for 90 ms.
    """
    with without_gc():
        yield
        gc.freeze()
