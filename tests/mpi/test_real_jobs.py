"""A real job of results/jobs on real ranks, by the commands that its page names: it trains, and is replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment

from .conftest import launch

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "results" / "jobs"


@pytest.mark.slow
def test_a_transformer_on_the_projects_pages(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (JOBS, ROOT)))
    done = launch(3, str(JOBS / "transformer.py"), "hardsync", "0.02", cwd=tmp_path, PYTHONPATH=path)
    assert done.status == 0, done.text
    assert "perplexity" in done.text
    command = [sys.executable, "-m", "mpisgd", "replay", "results/transformer-hardsync", "--trust"]
    env = environment() | {"PYTHONPATH": path}
    proof = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "bit for bit" in proof.stdout
