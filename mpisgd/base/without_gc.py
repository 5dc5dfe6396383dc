"""Imports without Python's garbage collector, which would search all objects repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection where no significant cycles arise."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and freeze all permanent objects (TRAPS 11)."""
    with without_gc():
        yield
        gc.freeze()
