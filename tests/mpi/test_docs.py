"""Every command of the documentation's pages is executed, in the pages' order, in one directory: later ones use earlier runs.

Those of mpisgd and scripts that stand side by side share one launch, which takes each for `mpirun --oversubscribe -n N`. The rest
are given to a shell as they are, as are all of the README, so that what launches ranks is also run as it is written.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from . import pages
from .conftest import Launched, execute

pytestmark = pytest.mark.slow

DOCS = pages.ROOT / "docs"
LONGEST_S = 60
"""A launch is ended when it takes so long for each of its commands."""
RANKS = re.compile(r"(?:mpirun --oversubscribe -n (\d+) )?(?:mpisgd|python(?= \w+\.py)) (.+)")
LAUNCH = {"run", "on_ranks.py"}
"""Commands that launch ranks: later ones use their runs."""
LOOK = {"doctor", "bench", "submit"}
"""Commands that look at how they were launched."""


class Shared(NamedTuple):
    """A command that can be called among ranks that have started."""

    ranks: int
    words: tuple[str, ...]


def in_order() -> list[Path]:
    """The pages as index.md lists them; those that are a link to a file elsewhere have no commands."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    return [DOCS / f"{line}.md" for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def commands() -> list[tuple[str, str]]:
    """Page and command, of which each is run once."""
    found: dict[str, str] = {}
    for page in in_order():
        for command in pages.commands(page):
            found.setdefault(command, page.stem)
    return [(page, command) for command, page in found.items()]


def shared(command: str) -> Shared | None:
    found = RANKS.fullmatch(command)
    words = shlex.split(found[2], comments=True) if found else []
    return Shared(int(found[1] or 1), tuple(words)) if found and words[0] not in LAUNCH | LOOK else None


def together(first: int) -> dict[int, Shared]:
    """The commands, from this one on, that one launch executes, by number."""
    rest = list(enumerate(commands()))[first:]
    until = itertools.takewhile(lambda each: not LAUNCH & set(each[1][1].split()), rest)
    return {number: each for number, (_, command) in until if (each := shared(command))}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs")
    pages.lay_out(directory, *in_order())
    return directory


@pytest.fixture(scope="module")
def ended() -> dict[int, Launched]:
    """How commands have ended that shared a launch, by number."""
    return {}


@pytest.mark.parametrize(
    ("number", "command"), [pytest.param(at, each, id=f"{at}-{page}") for at, (page, each) in enumerate(commands())]
)
def test_command(workplace: Path, ended: dict[int, Launched], number: int, command: str) -> None:
    if shared(command) is None:
        pages.execute(workplace, command)
        return
    if number not in ended:
        batch = together(number)
        calls = [(each.ranks, workplace, each.words) for each in batch.values()]
        ended.update(dict.fromkeys(batch, Launched(1, "", f"what began with number {number} did not come to its end")))
        done = execute(workplace, calls, max(each.ranks for each in batch.values()), timeout_s=LONGEST_S * len(batch))
        ended.update(zip(batch, done, strict=True))
    assert ended[number].status == 0, ended[number].text
