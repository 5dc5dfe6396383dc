"""Every command of the documentation's pages is executed, in the pages' order, in one directory: later ones use earlier runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import pages

pytestmark = pytest.mark.slow

DOCS = pages.ROOT / "docs"


def in_order() -> list[Path]:
    """The pages as index.md lists them; those that are a link to a file elsewhere have no commands."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    return [DOCS / f"{line}.md" for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def commands() -> list[tuple[str, str]]:
    return [(page.stem, command) for page in in_order() for command in pages.commands(page)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs")
    pages.lay_out(directory, *in_order())
    return directory


@pytest.mark.parametrize(("page", "command"), commands())
def test_command(workplace: Path, page: str, command: str) -> None:
    pages.execute(workplace, command)
