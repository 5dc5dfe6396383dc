"""Tests run side by side: what the exit status is, and that nothing is left when they are stopped (`tests/run.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import run

ROOT = Path(__file__).parents[3]
#: In the place of pytest: fails, or waits for its end, where it is told so.
FAKE = """
import os, pathlib, sys, time
name = "unit" if "--ignore=tests/mpi" in sys.argv else "alone" if "alone and not (long or rare)" in sys.argv else "together"
pathlib.Path(name).write_text(f"{os.getpid()} {os.nice(0)} {' '.join(sys.argv[1:])}")
while os.environ.get("WAITS"):
    time.sleep(0.02)
print(name, "has run")
sys.exit(int(os.environ.get(name, 0)))
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "pytest.py").write_text(FAKE)
    return tmp_path


def begun(here: Path, what: str, *words: str, **env: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("MPISGD_TESTS", "WORKERS")}
    command = [sys.executable, "-m", "tests.run", what, *words]
    return subprocess.Popen(
        command, cwd=here, env=known | {"PYTHONPATH": str(ROOT), **env}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("statuses", "status", "ran"), [((5, 5), 5, 2), ((0, 5), 0, 2), ((5, 0), 0, 2), ((1, 0), 1, 1), ((0, 2), 2, 2), ((5, 3), 3, 2)]
)
def test_the_status_of_parts(statuses: tuple[int, ...], status: int, ran: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is neither 0 nor 5 ends them; 5 where none has selected a test."""
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "run", lambda command: (seen.append(command), statuses[len(seen) - 1])[1])
    assert run.mpi([["a"], ["b"]], ["-k", "x y"]) == status
    assert [command[-3:] for command in seen] == [["a", "-k", "x y"], ["b", "-k", "x y"]][:ran]


@pytest.mark.parametrize(("fails", "status"), [({}, 0), ({"unit": "1"}, 1), ({"together": "2"}, 1)])
def test_what_runs_beside_counts_and_is_told_last(fails: dict[str, str], status: int, here: Path) -> None:
    process = begun(here, "both", "-k", "x y", WORKERS="0", **fails)
    assert process.communicate()[0].splitlines()[-1] == "unit has run"
    assert process.returncode == status
    assert not (here / "alone").exists()
    (_, low, *unit), (_, usual, *together) = ((here / name).read_text().split() for name in ("unit", "together"))
    assert int(low) == 19 and int(usual) == os.nice(0)
    assert unit[:2] == ["-n", "0"] and "-n 0 --dist loadscope" in " ".join(together)
    assert unit[-3:] == together[-3:] == ["-k", "x", "y"]


def test_all_tests_have_those_that_measure_seconds_and_all_cores(here: Path) -> None:
    process = begun(here, "both", MPISGD_TESTS="rest", alone="4")
    process.communicate()
    assert process.returncode == 1 and not (here / "together").exists(), "alone comes first, and has failed"
    process = begun(here, "mpi", MPISGD_TESTS="rest")
    assert process.communicate()[0] == "together has run\nalone has run\n"
    assert " ".join(run.unit("all", "auto")).endswith("-m not (long)")


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_what_is_stopped_leaves_nothing(number: signal.Signals, to_all: bool, here: Path) -> None:
    """A terminal sends SIGINT to all but those of another session; `kill` sends SIGTERM to one."""
    process = begun(here, "both", WAITS="yes")
    files, pids = [here / "unit", here / "together"], []
    while len(pids) < 2:
        time.sleep(0.02)
        pids = [int(file.read_text().split()[0]) for file in files if file.exists() and file.read_text()]
    (os.killpg if to_all else os.kill)(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
