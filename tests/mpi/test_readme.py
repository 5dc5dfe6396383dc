"""Every command in README.md is executed, in order, in one directory: what is written there works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import pages

pytestmark = pytest.mark.slow

README = pages.ROOT / "README.md"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("readme")
    pages.lay_out(directory, README)
    return directory


@pytest.mark.parametrize("command", pages.commands(README))
def test_command(workplace: Path, command: str) -> None:
    pages.execute(workplace, command)


def test_ci_executes_the_rest() -> None:
    for command, script in pages.ELSEWHERE.items():
        assert re.search(rf"^{command}$", (pages.ROOT / script).read_text(), re.MULTILINE)
