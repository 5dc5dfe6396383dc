"""A campaign that is stopped goes on where it was, and ends with the table of one that was not (`tests/faults/campaign.py`)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.records.log import schema
from tests.faults import campaign
from tests.faults.campaign import Found

ROOT = Path(__file__).parents[3]


class Runs:
    """Runs of a campaign that take no time; number `stop` is interrupted, number `broken` raises."""

    def __init__(self, stop: int = -1, broken: int = -1) -> None:
        self.stop, self.broken = stop, broken
        self.done: list[int] = []

    def __call__(self, generator: random.Random, directory: Path, number: int) -> Found:
        if number == self.stop:
            raise KeyboardInterrupt
        self.done.append(number)
        (directory / "left").write_text("x")
        found = Found([generator.choice("ab")])
        found.totals["drawn"] += generator.randrange(100)
        found.seconds["took"].append(generator.random())
        found.expect(number != 4, "four is bad")
        if number == self.broken:
            raise ValueError("a bug of the campaign")
        return found


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "launcher", lambda: "mpirun")
    monkeypatch.setattr(campaign, "machine", lambda mpi: {"commit": "abc1234", "mpi": mpi})
    monkeypatch.setattr(campaign, "stop_orderly", lambda: None)


def main(runs: Runs, out: Path, *words: str) -> int:
    return campaign.main("try", "A try.", 6, runs, ["--out", str(out), *words])


def table(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "try.json").read_text()))


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(Runs(), whole) == 1, "number 4 fails"
    for stop, done in ((2, [0, 1]), (5, [2, 3, 4])):
        runs = Runs(stop)
        with pytest.raises(KeyboardInterrupt):
            main(runs, parts)
        assert runs.done == done
        assert (table(parts)["count"], table(parts)["of"]) == (stop, 6)
    with (parts / "try.runs").open("a") as file:
        file.write("[5, {")  # of one that was killed while it wrote
    runs = Runs()
    assert main(runs, parts) == 1
    assert runs.done == [5]
    assert table(parts) == table(whole)
    assert [path.name for path in parts.iterdir()] == ["try.json"]


STOPPED = """
import os, signal, sys, time
from tests.faults import job
job.stop_orderly()
try:
    os.kill(os.getpid(), signal.Signals(int(sys.argv[1])))
    time.sleep(10)
finally:
    for other in (signal.SIGTERM, signal.SIGINT):  # of whoever started it, and of its terminal
        os.kill(os.getpid(), other)
    print("all jobs are ended")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_stops_it_twice_stops_it_once(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED, str(int(number))], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (128 + number, "all jobs are ended\n"), done.stderr


def test_one_that_is_whole_is_only_told(tmp_path: Path) -> None:
    main(Runs(), tmp_path)
    runs = Runs()
    assert main(runs, tmp_path) == 1, "what it found counts"
    assert main(runs, tmp_path, "--count", "3") == 1
    assert runs.done == []


@pytest.mark.parametrize("words", [("--seed", "2"), ()])
def test_of_another_seed_or_commit_it_begins_anew(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        main(Runs(stop=3), tmp_path)
    if not words:
        monkeypatch.setattr(campaign, "machine", lambda mpi: {"commit": "def5678", "mpi": mpi})
    runs = Runs()
    main(runs, tmp_path, *words)
    assert runs.done == list(range(6))
    before = table(tmp_path)
    runs = Runs()
    main(runs, tmp_path, "--seed", "3")
    assert runs.done == list(range(6))
    assert table(tmp_path)["totals"] != before["totals"]


def test_single_runs_are_those_of_the_campaign_and_are_not_kept(tmp_path: Path) -> None:
    main(Runs(), tmp_path)
    before = (tmp_path / "try.json").read_bytes()
    runs = Runs()
    assert main(runs, tmp_path, "--only", "2", "1") == 0
    assert runs.done == [2, 1]
    assert (tmp_path / "try.json").read_bytes() == before


def test_a_run_that_raises_is_a_failure_of_that_run(tmp_path: Path) -> None:
    runs = Runs(broken=1)
    assert main(runs, tmp_path, "--keep", str(tmp_path / "keep"), "--count", "3") == 1
    assert runs.done == [0, 1, 2]
    assert "ValueError: a bug of the campaign" in table(tmp_path)["failures"][0]
    assert (tmp_path / "keep" / "1" / "left").is_file()


def test_other_bits_and_a_lack_of_updates_are_failures(tmp_path: Path) -> None:
    found = Found()
    for name, weights in (("run", [1.0, 2.0]), ("alone", [1.0, 2.0]), ("other", [1.0, 2.5])):
        (tmp_path / name).mkdir()
        torch.save({"theta": {"layer": torch.tensor(weights)}}, tmp_path / name / schema.WEIGHTS)
    updates = np.array([(0, 1), (1, 1), (0, 2), (1, 3)], [("shard", int), ("clock", int)])
    run: Any = SimpleNamespace(updates=updates, books=lambda: [SimpleNamespace(balanced=True)])
    found.same_bits(tmp_path / "run", tmp_path / "alone")
    found.balanced(run)
    assert found.no_update_lost(run, 0, 2) == 2
    assert found.failures == []
    found.same_bits(tmp_path / "run", tmp_path / "other")
    found.no_update_lost(run, 1, 3)
    assert found.failures == ["it ends with other bits than the job left alone", "shard 1: updates are lost or doubled"]
    assert found.totals["compared bit for bit"] == 2


def test_a_job_that_left_no_done_or_a_process_is_a_failure(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(left_s=0.1, text="all it said")
    assert not Found().well(job, 0, tmp_path), "there is no DONE"
    (tmp_path / schema.DONE).touch()
    found = Found()
    assert found.well(job, 0, tmp_path) and not found.well(job, 1, tmp_path, "drawn")
    job.left_s = None
    assert not found.well(job, 0, tmp_path)
    assert found.failures[0] == "status 1, gone 0.1, DONE True, drawn\nall it said"
