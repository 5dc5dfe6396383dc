"""A learner that is stopped in mid-run: the others say whom they wait for; when it goes on, so does the run (DESIGN 4, law 9)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpisgd.base.errors import DataError
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.records.log.reader import Run

from .conftest import DRIVE

pytestmark = pytest.mark.alone


def has_begun(run: Path) -> bool:
    """Whether updates are in the log of a run that is under way."""
    try:
        return len(Run(run).updates) > 0
    except (DataError, OSError, KeyError, RuntimeError):  # its files are being made
        return False


def test_a_learner_that_is_stopped_is_named(tmp_path: Path) -> None:
    config = {
        "out": str(tmp_path / "run"),
        "epochs": 4.0,
        "threads": 1,
        "model": "softmax",
        "log": {"progress": "off", "quiet_s": 2.0, "flush_s": 0.1},
        "straggler": {"delay": "constant", "delay_mean_s": 0.02},
    }
    listing, said = tmp_path / "jobs.json", tmp_path / "said"
    stopped_too = tmp_path / "stopped"  # at the latest there learners wait for the test
    listing.write_text(json.dumps([{"ranks": 3, "config": config, "held": 60, "until": str(stopped_too)}]))
    command = [*mpirun(3), sys.executable, str(DRIVE), str(listing), "together"]
    moved = r"moved for \d+ s: "
    own, shard = r"learner 0 \(rank 1 on .*\) waits for ", r"shard 0 \(rank 0 on .*\)"
    between = (  # it was stopped between two messages
        rf"{moved}{shard} at clock (\d+) waits for learner 1 \(rank 2 on .*\), which was given ",
        rf"{own}this shard, for clock \d+ or later",
        rf"{moved}{own}ANSWER of {shard}",
    )
    within = (  # in the midst of one
        rf"{moved}{shard} waits for learner 1 \(rank 2 on .*\) to take ANSWER",
        rf"{moved}{own}(ANSWER of {shard}|{shard} to take PUSH)",
    )
    with said.open("w") as err:
        process = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=err)
    until_s = time.monotonic() + 120
    try:
        while not has_begun(tmp_path / "run"):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        stopped = json.loads(Path(f"{listing}.pids").read_text())[0][2]
        os.kill(stopped, signal.SIGSTOP)
        stopped_too.touch()
        while not any(all(re.search(each, said.read_text()) for each in told) for told in (between, within)):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < until_s, said.read_text()
            time.sleep(0.1)
        os.kill(stopped, signal.SIGCONT)
        assert process.wait(120) == 0, said.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert Run(tmp_path / "run").done is not None
