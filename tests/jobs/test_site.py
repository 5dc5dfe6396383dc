"""The cluster's recipe (docs/howto/cluster.md): after it, ranks run on the site's MPI, and nothing replaces its mpi4py.

MPISGD_SITE_PYTHON names the Python of an environment that was made by the recipe, MPISGD_SITE_MPIRUN the site's launcher. To make
one takes a C compiler, the site's MPI and some minutes: with Debian's Open MPI (`apt-get install openmpi-bin libopenmpi-dev`),
MPICC=/usr/bin/mpicc.openmpi and /usr/bin/mpirun.openmpi.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON, MPIRUN = (os.environ.get(f"MPISGD_SITE_{name}", "") for name in ("PYTHON", "MPIRUN"))
pytestmark = pytest.mark.skipif(not (PYTHON and MPIRUN), reason="no environment of the recipe: MPISGD_SITE_PYTHON, _MPIRUN")


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
