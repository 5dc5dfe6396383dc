"""Both forms are tested: the sources as they are and, by `make test-compiled`, what mypyc makes of them."""

from __future__ import annotations

import pytest

from mpisgd.comm.virtual import compiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiled code calls its own functions directly and takes no stand-ins: such tests are of the interpreted form alone."""
    if not compiled.is_compiled():
        return
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces what compiled code calls directly"))
