"""What the texts say of speed is what the kept files say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = [sys.executable, str(ROOT / "results" / "speed.py"), "--out", str(tmp_path_factory.mktemp("figures"))]
    return subprocess.run(script, capture_output=True, text=True, check=True, timeout=120).stdout


def rows_in(text: str) -> list[list[str]]:
    """The cells of all pipe tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if re.match(r"\| [^-]", line)]


@pytest.mark.parametrize(("page", "at_least"), [("docs/explanation/performance.md", 6), ("results/README.md", 25)])
def test_tables_of_ratios_have_the_rows_of_the_kept_files(printed: str, page: str, at_least: int) -> None:
    known = rows_in(printed)
    page_rows = rows_in((ROOT / page).read_text())
    bench = {row[0] for row in known}
    told = [row for row in page_rows if row[0] in bench and len(row) in (5, 6)]
    assert len(told) >= at_least
    assert [row for row in told if row not in known] == []
