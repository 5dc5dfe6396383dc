"""The words with which ranks are started, as a user can copy them: Open MPI refuses more ranks than cores without its leave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpisgd
from mpisgd.base.errors import ConfigError
from mpisgd.cli import bench, demo
from mpisgd.comm.mpi import launch
from mpisgd.config import Config
from mpisgd.exchange.roles import of_job
from mpisgd.liveness.guard import SIZE_VARIABLES

PACKAGE = Path(mpisgd.__file__).parent


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SIZE_VARIABLES, *launch._BATCH_JOBS, launch._ULFM, "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "cores", lambda: 2)
    monkeypatch.setattr(launch, "version", lambda: "mpirun (Open MPI) 5.0.11")


def test_leave_is_asked_for_where_there_are_fewer_cores_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.words(2) == "mpirun -n 2"
    assert launch.words(3) == "mpirun --oversubscribe -n 3"
    monkeypatch.setenv(launch._ULFM, "1")
    assert launch.words(3) == "mpirun --with-ft ulfm --oversubscribe -n 3"


def test_other_launchers_know_no_such_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "version", lambda: "HYDRA build details: Version: 5.0.2")
    assert launch.words(9) == "mpirun -n 9"
    monkeypatch.setattr(launch, "version", lambda: "mpirun (Open MPI) 5.0.11")
    monkeypatch.setenv("PMI_SIZE", "9")
    assert launch.words(9) == "mpirun -n 9", "this rank was started by MPICH's"


def test_a_cluster_counts_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "16")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert launch.words(16) == "mpirun -n 16", "two on each node"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "8")
    assert launch.words(16) == "mpirun --oversubscribe -n 16"
    assert launch.words(4) == "mpirun -n 4", "fewer than now, on the same two nodes"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launch.words(16) == "mpirun -n 16"


def test_what_is_printed_can_be_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Ended:
        returncode = 1

    monkeypatch.setattr(demo.subprocess, "run", lambda *words, **options: Ended())
    assert demo.main(["--out", str(tmp_path)]) != 0
    assert "$ mpirun --oversubscribe -n 9 mpisgd train --protocol hardsync" in capsys.readouterr().out
    assert "mpirun --oversubscribe -n 4 mpisgd bench wire" in bench.usage("mpisgd bench", bench.BENCHES)
    with pytest.raises(ConfigError, match="start with: mpirun --oversubscribe -n 4"):
        of_job(Config(shards=3), "aa")


def test_nobody_else_makes_up_such_words() -> None:
    """A command with a number of ranks comes from `launch.words`, but for examples in help texts and templates of batch scripts."""
    made_up = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"mpirun [^`]*-n \{", line) and path.name not in ("launch.py", "doctor.py", "launchers.py")
    ]
    assert made_up == [], "doctor's and those of the table of launchers are of a batch job, whose slots are granted"
