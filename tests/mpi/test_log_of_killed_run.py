"""The run log while the job runs, and after all ranks were killed: everything up to the last flush."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.records.log.reader import Run

pytestmark = pytest.mark.slow


def test_readable_while_running_and_after_kill(tmp_path: Path) -> None:
    words = ["--epochs", "1e6", "--log.flush-rows", "50", "--log.flush-s", "0.2", "--log.progress", "off", "--shards", "2"]
    command = [*mpirun(4), sys.executable, "-m", "mpisgd", "train", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        lengths = []
        deadline_s = time.monotonic() + 180
        while len(lengths) < 2 and time.monotonic() < deadline_s:
            path = tmp_path / "results" / "run"
            if len(list(path.glob("shard-*.h5"))) == 2:
                rows = len(Run(path).pushes)
                if rows > 0 and (not lengths or rows > lengths[-1]):
                    lengths.append(rows)
            time.sleep(0.05)
        assert len(lengths) == 2, "rows appear while the job runs"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run = Run(path)
    assert run.done is None
    assert len(run.pushes) >= lengths[-1]
    for shard in (0, 1):
        clocks = run.updates["clock"][run.updates["shard"] == shard]
        assert np.array_equal(clocks, np.arange(1, len(clocks) + 1)), "whole rows, none missing"
    assert all(books.balanced for books in run.books())
