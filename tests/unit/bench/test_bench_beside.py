"""This checkout beside another one: what is launched where, what is compared, and what is refused. Nothing is measured here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from tests.bench import beside

LAYOUT = {"nbytes": 350_000, "learners": 1, "shards": 2}


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "mpirun", lambda ranks: ["mpirun", "-n", str(ranks)])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other" / "mpisgd").mkdir(parents=True)
    (tmp_path / "other" / "mpisgd" / "__main__.py").touch()
    return tmp_path / "other"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """Launches that measure nothing: here a cycle takes 1 ms, then 2, elsewhere 3 ms; of images there are 100, and 50."""
    seen: list[tuple[Path, str]] = []

    def run(command: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert env["PYTHONPATH"] == str(cwd), "its own code is run"
        bench, out = command[command.index("bench") + 1], Path(command[command.index("--out") + 1])
        here = cwd == beside.HERE
        cycle_s = 1e-3 * (1 + seen.count((cwd, bench))) if here else 3e-3
        images = {"hardsync": {"median": 100.0 if here else 50.0}} | ({"only here": {"median": 1.0}} if here else {})
        rows = {"wire": [{**LAYOUT, "cycle_s": {"median": cycle_s}}], "train": [{"case": "MLP", "images_per_s": images}]}
        (out / f"{bench}.json").write_text(json.dumps({"rows": rows[bench]}))
        seen.append((cwd, bench))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_both_are_launched_in_turn_and_compared(other: Path, launches: list[tuple[Path, str]]) -> None:
    rows = beside.measure(2, str(other))
    here = beside.HERE
    assert launches == [(where, bench) for bench in ("wire", "train") for where in (here, other, other, here)]
    assert [row["what"] for row in rows] == ["350,000 bytes, 1 learners, 2 shards", "MLP, hardsync"]
    assert rows[0]["here_over_there"] == pytest.approx({"median": 2.25, "min": 1.5, "max": 3.0})
    assert rows[1]["here_over_there"] == pytest.approx({"median": 2.0, "min": 2.0, "max": 2.0})
    assert beside.lines_of(rows)[1].endswith("2.00 (2.00 to 2.00)")


@pytest.mark.parametrize("checkout", ["", "nowhere"])
def test_what_is_no_checkout_is_refused(checkout: str) -> None:
    with pytest.raises(ConfigError, match=r"checkout = .* a checkout of mpisgd"):
        beside.measure(1, checkout)


def test_a_bench_that_fails_is_told(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "no such option")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match=r"(?s)bench wire.*exit status 2\nno such option"):
        beside.measure(1, str(other))
