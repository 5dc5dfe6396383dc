"""A run that commit 4b8dbc2 began and a signal interrupted goes on to its end, on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.analysis import about
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.records.log.reader import Run
from tests.unit.older_runs import unpack


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_is_resumed_and_proved(tmp_path: Path) -> None:
    path = unpack("hardsync", tmp_path)
    command = [*mpirun(5), sys.executable, "-m", "mpisgd", "train", "--resume", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    run = Run(path)
    assert about.status(run).text == "finished" and run.attempt == 1
    assert run.summaries["final_clock"].tolist() == [30, 30]
    assert all(books.balanced for books in run.books())
    proof = replay.replay(path)
    if not proof.holds:  # the last bits of the attempt before may be those of another kind of CPU
        proof = replay.replay(path, tolerance=1e-3)
    assert proof.holds, proof.reason
