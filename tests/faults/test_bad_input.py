"""What is said of bad input is what the kept table says; after a change, `python -m tests.faults.bad_input` renews it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.effort import spread

from .bad_case import Case
from .bad_input import CASES, kept, message, said_here


@pytest.mark.parametrize("case", spread(CASES, 2), ids=lambda case: case.told)
def test_messages_and_statuses_are_those_of_the_table(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, text = said_here(case, tmp_path)
    assert status == 2
    for name in case.names:
        assert name in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 40, "one screen"
    assert kept()[case.told] == (message(text, tmp_path).replace("|", "&#124;"), status)


def test_every_row_of_the_table_is_a_refusal() -> None:
    rows = kept()
    assert {case.told for case in CASES} <= set(rows)
    assert len(rows) > len(CASES) + 30, "those on real ranks"
    assert all(status in (1, 2) for _, status in rows.values())
