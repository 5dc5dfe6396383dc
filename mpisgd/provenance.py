"""Where a run came from: versions, git commit, command line, time; for its config.toml (DESIGN 6)."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from typing import Any

import h5py
import numpy as np
import torch

from mpisgd import __version__
from mpisgd.mpi import MPI


def provenance() -> dict[str, Any]:
    """Part of the table [environment]."""
    return {
        "versions": {
            "mpisgd": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "h5py": h5py.__version__,
            "mpi": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        },
        "git_commit": _git_commit(),
        "command_line": list(sys.argv),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git_commit() -> str:
    """The commit of the user's working directory, or "" outside of one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
