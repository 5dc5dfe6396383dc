"""What the texts say of speed and of faults is what the kept files say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.faults import summary
from tests.faults.__main__ import STAGES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[str]]]:
    """The rows that a script of results/ prints, which is run once."""
    figures = tmp_path_factory.mktemp("figures")

    @cache
    def rows_of(name: str) -> list[list[str]]:
        script = [sys.executable, str(ROOT / "results" / f"{name}.py"), "--out", str(figures)]
        return rows_in(subprocess.run(script, capture_output=True, text=True, check=True, timeout=300).stdout)

    return rows_of


def rows_in(text: str) -> list[list[str]]:
    """The cells of all pipe tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if re.match(r"\| [^-]", line)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "at_least"), [("docs/explanation/performance.md", 6), ("results/README.md", 25)])
def test_tables_of_ratios_have_the_rows_of_the_kept_files(
    printed: Callable[[str], list[list[str]]], page: str, at_least: int
) -> None:
    known, of_nodes = printed("speed"), printed("links")
    page_rows = rows_in((ROOT / page).read_text())
    bench = {row[0] for row in known}
    told = [row for row in page_rows if row[0] in bench and len(row) in (5, 6) and row not in of_nodes]
    assert len(told) >= at_least
    assert [row for row in told if row not in known] == []


@pytest.mark.slow
def test_tables_of_several_nodes_are_those_of_the_kept_file(printed: Callable[[str], list[list[str]]]) -> None:
    known = printed("links")
    page_rows = rows_in((ROOT / "results" / "README.md").read_text())
    assert len(known) > 40
    assert [row for row in known if row not in page_rows] == []


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "figures").glob("*.json")), ids=lambda path: path.stem)
def test_the_numbers_of_a_figure_say_when_they_were_made(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", kept["date"])
    assert re.fullmatch("[0-9a-f]{40}", kept["commit"])
    page = (ROOT / "results" / "README.md").read_text()
    assert f"<!-- {path.stem}: " in page, "and stand in README.md"


FAULTS = ROOT / "results" / "faults"


@pytest.mark.parametrize("name", sorted(path.stem for path in FAULTS.glob("*.json")))
def test_a_kept_campaign_is_whole_and_found_nothing(name: str) -> None:
    table = json.loads((FAULTS / f"{name}.json").read_text())
    assert table["failures"] == []
    assert table["count"] >= table.get("of", 1), "it was run to its end"
    assert isinstance(table["seed"], int)
    assert re.fullmatch("[0-9a-f]{7,}", table["commit"]), "of a state that there is, without edits"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table["date"])


OF_MAKE_FAULTS = {name for stage in STAGES for lane in stage for name in lane}
STORMS = {path.stem for path in FAULTS.glob("virtual-*.json")}


@pytest.mark.parametrize("names", [OF_MAKE_FAULTS, STORMS], ids=["make faults", "storms"])
def test_campaigns_are_of_one_package(names: set[str]) -> None:
    commits = {json.loads((FAULTS / f"{name}.json").read_text())["commit"] for name in names}
    package_of = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet"]
    packages = {subprocess.run([*package_of, f"{each}:mpisgd"], check=False, capture_output=True).stdout for each in commits}
    if b"" in packages:
        pytest.skip("a copy without git's history does not know the commits of the campaigns")
    assert len(packages) == 1, sorted(commits)


def test_the_page_of_the_campaigns_has_the_tables_of_the_kept_files() -> None:
    text = (FAULTS / "README.md").read_text()
    assert text == summary.page(text, FAULTS), "python -m tests.faults.summary results/faults"


def test_the_page_of_data_has_the_costs_that_were_measured() -> None:
    text = (ROOT / "docs" / "reference" / "models-and-data.md").read_text()
    job, *layouts = json.loads((ROOT / "results" / "bench" / "memory.json").read_text())["rows"]
    told = [row for row in rows_in(text) if row[0] in {each["chunk"] for each in layouts}]
    assert told == [[each["chunk"], f"{each['random_us']:.0f}", f"{each['in_order_us']:.0f}"] for each in layouts]
    assert f"took {max(each['more'] for each in job['mib']):.0f} MiB" in text
    assert f"came after {job['first_update_s']:.0f} s" in text
