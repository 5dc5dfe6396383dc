"""The documentation: pages made from the code are as the code is, what the code cites is there, and links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mpisgd.cli import help
from mpisgd.config import KINDS, Config, options

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
#: Pages with links; what is brought into the documentation from elsewhere, too.
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md", "results/README.md")),
]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", generator().PAGES)
def test_reference_is_as_the_code_is(name: str) -> None:
    """`python docs/generate.py` renews it."""
    assert (DOCS / "reference" / f"{name}.md").read_text() == generator().PAGES[name]()


def test_every_environment_variable_is_explained() -> None:
    named = {name for path in sources("mpisgd") for name in re.findall(r"\bMPISGD_[A-Z_]*[A-Z]\b", path.read_text())}
    assert named == set(generator().VARIABLES)


def test_every_option_has_a_text_and_a_group() -> None:
    grouped = [name for names in {**help.GROUPS, **help.VIRTUAL}.values() for name in names]
    assert sorted(grouped) == sorted(each.name for each in options()), "each once"
    classes = [type(getattr(Config(), name)) for name in grouped if hasattr(getattr(Config(), name), "__dataclass_fields__")]
    for cls in {Config, *classes, *(cls for kinds in KINDS.values() for cls in kinds.values())}:
        assert set(help.texts(cls)) == {field.name for field in dataclasses.fields(cls)}, cls


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))


@pytest.mark.slow
@pytest.mark.parametrize(("word", "page"), [("DESIGN", "design"), ("TRAPS", "traps")])
def test_every_section_that_the_code_cites_is_there(word: str, page: str) -> None:
    text = (DOCS / "explanation" / f"{page}.md").read_text()
    there = set(re.findall(r"^## (\d+)\. ", text, re.MULTILINE))
    cited = set()
    for path in sources("mpisgd", "tests", "results"):
        for numbers in re.findall(rf"\b{word} (\d+(?:, \d+)*)", path.read_text()):
            cited |= set(numbers.split(", "))
    assert cited
    assert cited <= there


@pytest.mark.slow
def test_every_law_that_the_code_cites_is_there() -> None:
    section = (DOCS / "explanation" / "design.md").read_text().split("## 4. Laws")[1].split("\n## ")[0]
    there = set(re.findall(r"^(\d)\. \*\*", section, re.MULTILINE))
    cited = {number for path in sources("mpisgd", "tests") for number in re.findall(r"\b[Ll]aw (\d+)", path.read_text())}
    assert cited
    assert cited <= there


def test_every_page_is_in_the_index() -> None:
    """The order of tests/mpi/test_docs.py comes from there."""
    listed = re.findall(r"^(tutorial|\w+/[\w-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if page.stem != "index"
    )


def test_a_plain_script_becomes_a_job_by_five_lines() -> None:
    """tests/mpi/test_docs.py runs both."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (DOCS / "tutorial.md").read_text(), re.DOTALL | re.MULTILINE)
    old, new, *lines = diff.splitlines()
    assert (old[:4], new[:4]) == ("--- ", "+++ ")
    assert len([line for line in lines if line.startswith("+")]) == 5


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def anchors(path: Path) -> set[str]:
    """What headings are called in links, as GitHub and MyST call them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            path = page.parent / target if target else page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"


def test_commands_that_are_not_executed_say_why() -> None:
    """tests/mpi/test_docs.py executes blocks of `sh`."""
    for page in DOCS.rglob("*.md"):
        before = re.findall(r"^(.*)\n```bash$", page.read_text(), re.MULTILINE)
        assert all(re.fullmatch(r"<!-- not run: \S.* -->", line) for line in before), page
