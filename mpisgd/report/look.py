"""Look of figures, for `report`, `compare` and `timeline`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from mpisgd.base.checks import require

Format = Literal["png", "pdf", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
WIDTH_IN = 6.8
_LEAST_IN, _MOST_IN = 3.0, 40.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look of figures."""

    format: tuple[Format, ...] = ("png",)
    """Formats of each figure. png has 150 dots per inch; pdf and svg can be enlarged."""
    width: float = WIDTH_IN
    """Width of figures in inches, 3 to 40. Letters keep their size; the height follows, down to 2.8 inches."""
    title: str | None = None
    """Title of figures, in place of their own; "" = none."""

    def __post_init__(self) -> None:
        known = bool(self.format) and all(each in FORMATS for each in self.format)
        require(known, "format", " ".join(self.format), f"some of {', '.join(FORMATS)}")
        fits = math.isfinite(self.width) and _LEAST_IN <= self.width <= _MOST_IN
        require(fits, "width", self.width, f"inches, {_LEAST_IN:g} to {_MOST_IN:g}")


_DEFAULT = Look()
_PRESENT: ContextVar[Look] = ContextVar("look", default=_DEFAULT)


def present() -> Look:
    return _PRESENT.get()


@contextmanager
def applied(look: Look) -> Iterator[None]:
    """Apply a look within, whatever a matplotlibrc says."""
    from matplotlib import style

    before = _PRESENT.set(look)
    try:
        with style.context("default"):
            yield
    finally:
        _PRESENT.reset(before)
