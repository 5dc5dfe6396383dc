"""The way of a gradient, as docs/explanation/design.md tells it, is the way that a gradient goes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import greenlet
import pytest

import mpisgd
from tests.virtual.jobs import TENSORS, simulated

PACKAGE = Path(mpisgd.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "design.md"


def told() -> list[tuple[str, str]]:
    """File and function of each place of the page's table."""
    section = PAGE.read_text().partition("### The way of a gradient")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` `([\w.]+)` \|", section, re.MULTILINE)


@contextmanager
def calls_of_the_package() -> Iterator[list[tuple[str, str]]]:
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))

    before = greenlet.settrace(lambda *_: sys.setprofile(note))  # each greenlet has a profiler of its own
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        greenlet.settrace(before)


@pytest.fixture(scope="module")
def first_gradient(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """All calls of a learner that is alone, until it computes its second gradient."""
    job: dict[str, Any] = {**TENSORS, "epochs": 0.1, "virtual": {"learners": 1}, "shards": 1}
    with calls_of_the_package() as calls:
        simulated(tmp_path_factory.mktemp("walk") / "run", job, protocol={"name": "softsync", "n": 1})
    second = calls.index(told()[1], calls.index(told()[1]) + 1)
    return calls[:second]


def goes(calls: list[tuple[str, str]], places: list[tuple[str, str]]) -> bool:
    coming = iter(calls)
    return all(place in coming for place in places)


def test_a_gradient_goes_the_way_that_the_page_tells(first_gradient: list[tuple[str, str]]) -> None:
    assert len(told()) == 12
    assert goes(first_gradient, told())


@pytest.mark.parametrize("at", range(2, 11))
def test_another_order_is_seen(first_gradient: list[tuple[str, str]], at: int) -> None:
    places = told()
    places[at], places[at + 1] = places[at + 1], places[at]
    assert not goes(first_gradient, places)
