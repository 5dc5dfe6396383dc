"""`make audit` believes what was looked up, not pip-audit's last word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.audit import audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (2)"}


@pytest.mark.parametrize(
    ("found", "own_status", "status", "said"),
    [
        ([CLEAN, {**BAD, "vulns": []}], 0, 0, "2 packages were looked up: no known vulnerabilities"),
        ([CLEAN, BAD], 1, 1, "b 2: CVE-1; fixed in: 2.1\n2 packages were looked up: see above"),
        ([CLEAN, SKIPPED], 0, 3, "of 1 of 2 packages nothing is known: b"),
        ([SKIPPED, SKIPPED], 0, 3, "cannot be reached: nothing is known of any of 2 packages (Dependency not found"),
        ([CLEAN], 0, 3, "of 1 of 2 packages nothing is known: they were not looked up"),
        (None, 1, 3, "cannot be reached: nothing is known of any of 2 packages (ERROR: Failed to connect)"),
    ],
)
def test_what_it_says(
    found: list[dict[str, Any]] | None, own_status: int, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constraints, program, answer = tmp_path / "constraints.txt", tmp_path / "pip-audit", tmp_path / "answer.json"
    constraints.write_text("# a comment with ==\na==1\nb==2\n")
    copy = "true"
    if found is not None:
        answer.write_text(json.dumps({"dependencies": found, "fixes": []}))
        copy = f'cp {answer} "${{@: -1}}"'
    program.write_text(
        f'#!/bin/bash\n{copy}\necho "No known vulnerabilities found"\necho "ERROR: Failed to connect" >&2\nexit {own_status}\n'
    )
    program.chmod(0o755)
    assert audit(str(program), constraints) == status
    assert said in capsys.readouterr().out
