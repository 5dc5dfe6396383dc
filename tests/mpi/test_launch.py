"""What the package prints for copying is taken by the launcher, also with more ranks than cores."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from mpisgd.comm.mpi.launch import cores, environment, version, words


def started(command: str) -> int:
    """By a user's shell, which has none of the settings with which the tests start ranks."""
    env = {name: value for name, value in environment().items() if not name.startswith("PRTE_MCA_rmaps")}
    return subprocess.run([*shlex.split(command), "true"], env=env, check=False, timeout=120, capture_output=True).returncode


def test_the_launcher_takes_the_words() -> None:
    assert started(words(cores() + 1)) == 0


@pytest.mark.skipif("Open MPI" not in version(), reason="other launchers start as many ranks as they are told")
def test_without_leave_it_would_not() -> None:
    assert started(f"mpirun -n {cores() + 1}") != 0
