"""What new users' mistakes are answered with; after a change, `python -m tests.faults.mistakes` renews the kept table."""

from __future__ import annotations

import pytest

from .mistakes import LEAST, MISTAKES, TABLE, Mistake, helps, rows, table


@pytest.fixture(scope="module")
def found() -> list[tuple[Mistake, int, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return rows()


def test_nearly_all_are_answered_with_the_mend(found: list[tuple[Mistake, int, str]]) -> None:
    assert len(MISTAKES) >= 60
    assert len({(mistake.command, *mistake.files.values()) for mistake in MISTAKES}) == len(MISTAKES)
    assert sum(helps(*row) for row in found) >= LEAST
    without = [mistake.command for mistake, status, text in found if not helps(mistake, status, text) and not mistake.why_not]
    assert not without, "these have become worse"


def test_the_kept_table_says_so(found: list[tuple[Mistake, int, str]]) -> None:
    assert TABLE.read_text() == table(found)
