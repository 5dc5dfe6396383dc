"""Ctrl-C at a terminal: what was done is saved where the launcher leaves the time, and the way on is told in any case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpisgd.base.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from mpisgd.comm.mpi.launch import environment, mpirun, version, words
from mpisgd.records.checkpoint.checkpoint import newest
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from tests.terminal import at_a_terminal

ENVIRONMENT = {**environment(), "TERM": "dumb"}


@pytest.mark.alone  # Open MPI's launcher leaves a quarter of a second
def test_ctrl_c_ends_real_ranks_with_the_way_on(tmp_path: Path) -> None:
    """Open MPI's launcher passes nothing on any more, says 1, and kills its ranks half a second later; MPICH's passes Ctrl-C on."""
    options = ["--epochs", "1000", "--model", "softmax", "--threads", "1", "--out", "run", "--checkpoint.every-updates", "5"]
    command = [*mpirun(2), sys.executable, "-m", "mpisgd", "train", *options]
    run = tmp_path / "run"

    def ready(_: str) -> bool:
        return any((path / "manifest.json").exists() for path in run.glob("checkpoint/*"))

    status, screen = at_a_terminal(command, ready, ENVIRONMENT, tmp_path)
    clock = newest(run).clock
    assert not (run / schema.DONE).exists()
    assert "Traceback" not in screen
    assert f"{words(2)} mpisgd train --resume run" in screen
    if "Open MPI" in version():
        assert status != 0
        assert "mpisgd: the launcher ends the job (SIGTERM): writing a checkpoint; if no other line follows" in screen
        assert not (run / schema.LOCK).exists()
    else:
        assert status == EXIT_INTERRUPTED
        assert f"interrupted by SIGINT at clock {clock:,}, checkpoint at clock {clock:,} (nothing is lost)" in screen
    if "interrupted by" in screen:
        assert f"checkpoint at clock {clock:,} (nothing is lost)" in screen
    Lock(run).release()  # nobody holds the lock


@pytest.mark.slow
@pytest.mark.parametrize("computes", ["--virtual.no-gradients --epochs 100000", "--model softmax --epochs 1000"])
def test_ctrl_c_ends_one_process_with_one_line(computes: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpisgd", "simulate", "--virtual.learners", "4", *computes.split()]
    env = {name: value for name, value in ENVIRONMENT.items() if name not in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
    status, screen = at_a_terminal(command, lambda told: "virtual cluster" in told, env, tmp_path)
    assert status == EXIT_STOPPED, screen
    assert "mpisgd simulate: stopped by Ctrl-C" in screen
    assert "Traceback" not in screen
    assert "to begin anew: --overwrite" in screen
    assert not (tmp_path / "results" / "run" / schema.LOCK).exists()
