"""Every command of the documentation's pages is executed, in the pages' order, in one directory: later ones use earlier runs.

Those of mpisgd that stand side by side share one launch, which takes each for `mpirun --oversubscribe -n N`. The rest are given to
a shell as they are, as are all of the README, so that what launches ranks is also run as it is written.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from . import pages
from .conftest import Launched, execute

pytestmark = pytest.mark.slow

DOCS = pages.ROOT / "docs"
MOST = 10
"""Commands of one launch, which is ended when it takes `LONGEST_S` for each."""
LONGEST_S = 60
RANKS = re.compile(r"(?:mpirun --oversubscribe -n (\d+) )?mpisgd (.+)")
LAUNCH = {"run", "doctor", "bench", "submit"}
"""Commands that look at how they were launched, or launch ranks."""


class Shared(NamedTuple):
    """A command that can be called among ranks that have started."""

    ranks: int
    words: tuple[str, ...]


def in_order() -> list[Path]:
    """The pages as index.md lists them; those that are a link to a file elsewhere have no commands."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    return [DOCS / f"{line}.md" for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def commands() -> list[tuple[str, str]]:
    return [(page.stem, command) for page in in_order() for command in pages.commands(page)]


def shared(command: str) -> Shared | None:
    found = RANKS.fullmatch(command)
    words = shlex.split(found[2], comments=True) if found else []
    return Shared(int(found[1] or 1), tuple(words)) if found and words[0] not in LAUNCH else None


def together(first: int) -> list[Shared]:
    """The commands, from this one on, that one launch executes."""
    found: list[Shared] = []
    for _, command in commands()[first : first + MOST]:
        each = shared(command)
        if each is None:
            break
        found.append(each)
    return found


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
        calls = [(each.ranks, workplace, each.words) for each in batch]
        done = execute(workplace, calls, max(each.ranks for each in batch), timeout_s=LONGEST_S * len(batch))
        ended.update(enumerate(done, number))
    assert ended[number].status == 0, ended[number].text
