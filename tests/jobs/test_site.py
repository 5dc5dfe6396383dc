"""The cluster's recipe (docs/howto/cluster.md): after it, ranks run on the site's MPI, and nothing replaces its mpi4py.

`make bring` makes such an environment with Debian's Open MPI, where that can be had; MPISGD_SITE_PYTHON, its Python, and
MPISGD_SITE_MPIRUN, the site's launcher, name another one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BROUGHT = {"PYTHON": f"{REPOSITORY}/.venv-site/bin/python", "MPIRUN": "/usr/bin/mpirun.openmpi"}
PYTHON, MPIRUN = (os.environ.get(f"MPISGD_SITE_{name}", path) for name, path in BROUGHT.items())
THERE = all(Path(path).exists() for path in (PYTHON, MPIRUN))
pytestmark = pytest.mark.skipif(not THERE, reason="no environment of the recipe: MPISGD_SITE_PYTHON, _MPIRUN, or `make bring`")


def said(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_MCA", "PRTE_MCA"))}
    env |= {"PYTHONPATH": str(REPOSITORY), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor_says_the_sites_mpi_on_as_many_ranks_as_were_started() -> None:
    site = said(MPIRUN, "--version").split("\n")[0].rstrip()
    told = said(MPIRUN, "--oversubscribe", "-n", "3", PYTHON, "-m", "mpisgd", "doctor")
    assert site.split()[-1] in told.split("ranks")[0], "the version of its launcher, in the line of the library"
    assert "3 on 1 host" in told


def test_the_last_line_of_the_recipe_leaves_its_mpi4py_alone() -> None:
    words = ("install", "--dry-run", "--no-deps", "-c", "constraints.txt", "mpi4py")
    assert "Would install mpi4py" not in said(PYTHON, "-m", "pip", *words)
