"""The garbage collector is out of the way, and back afterwards, whatever happens between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from mpisgd.base.without_gc import importing, without_gc


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("block", [without_gc, importing])
@pytest.mark.parametrize("before", [True, False])
def test_it_is_back_as_it_was(block: Callable[[], AbstractContextManager[None]], before: bool) -> None:
    (gc.enable if before else gc.disable)()
    with pytest.raises(RuntimeError), block():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled() == before


def test_what_was_imported_is_never_looked_at_again() -> None:
    gc.unfreeze()
    with importing():
        kept = [[] for _ in range(1000)]
    assert gc.get_freeze_count() > len(kept)
    gc.unfreeze()
    with without_gc():
        pass
    assert gc.get_freeze_count() == 0
