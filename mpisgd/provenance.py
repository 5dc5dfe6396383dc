"""Where a run came from: versions, git commit, command line, time; for its config.toml (DESIGN 6)."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import torch

from mpisgd import __version__, compiled, protocols
from mpisgd.config import Config
from mpisgd.parts import Meta
from mpisgd.roles import Roles


def environment(config: Config, roles: Roles, hosts: Sequence[str], meta: Meta, *, mpi: str, **more: Any) -> dict[str, Any]:
    """The table [environment] of a run's config.toml: who took part, on what, sizes, versions.

    `mpi` is the MPI library's version, or what stood for one; `more` is added as it is.
    """
    teams = {"teams": [list(team) for team in roles.teams]} if config.in_teams else {}
    return {
        "learners": roles.lambda_,
        **teams,
        "world_size": len(hosts),
        "shard_ranks": list(roles.shard_ranks),
        "evaluator_rank": roles.evaluator_rank if roles.dedicated_evaluator else -1,
        "hosts": list(hosts),
        "threads": torch.get_num_threads(),
        "train_samples": meta.train_samples,
        "test_samples": meta.test_samples,
        "gradients_per_update": protocols.make(config.protocol, roles.lambda_).gradients_per_update,
        **more,
        "form": compiled.form(),
        "versions": {
            "mpisgd": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "h5py": h5py.__version__,
            "mpi": mpi,
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
