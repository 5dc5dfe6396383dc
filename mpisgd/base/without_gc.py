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
    """Import without garbage collection: searching 300,000 permanent objects takes a fifth longer.

    Freeze them: a later full collection would stop a training rank for 90 ms.
    """
    with without_gc():
        yield
        gc.freeze()
