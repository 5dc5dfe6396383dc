"""Provenance of a run for config.toml: versions, commits, the user's parts, command line, time (DESIGN 6)."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from mpisgd.base.git import Commit, commit_of, commit_of_package
from mpisgd.base.version import __version__
from mpisgd.config.config_file import is_of_a_run
from mpisgd.exchange.ways import STREAMED
from mpisgd.job import user_code
from mpisgd.job.parts import UserObjects
from mpisgd.job.world import Setup
from mpisgd.records import initial
from mpisgd.records.log import schema


def environment(setup: Setup, user_objects: UserObjects, *, mpi: str, commits: bool = True, **more: Any) -> dict[str, Any]:
    """Return the table [environment]; run git if `commits`."""
    config, roles, hosts, meta = setup.config, setup.roles, setup.hosts, setup.meta
    named = user_code.described(config, user_objects)
    teams = {"teams": [list(team) for team in roles.teams]} if config.in_teams else {}
    slices: dict[str, Any] = {"slices": list(config.slices)} if config.slices else {}
    if config.way == STREAMED:
        slices["chunks"] = config.chunks
    groups: dict[str, Any] = {}
    if setup.stages is not None:
        groups = {"groups": [list(group) for group in roles.groups], "stages": setup.stages.listed}
    return {
        "learners": roles.lambda_,
        **teams,
        **groups,
        "world_size": len(hosts),
        "shard_ranks": list(roles.shard_ranks),
        "evaluator_rank": roles.evaluator_rank if roles.dedicated_evaluator else -1,
        "hosts": list(hosts),
        "threads": torch.get_num_threads(),
        "train_samples": meta.train_samples,
        "test_samples": meta.test_samples,
        "way": config.way,
        **slices,
        "gradients_per_update": config.protocol.make(roles.lambda_).gradients_per_update,
        **more,
        "rules": schema.RULES,
        "versions": {
            "mpisgd": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "h5py": h5py.__version__,
            "mpi": mpi,
        },
        "brought": {**named, **initial.described(config)},
        **(_commits(user_code.files_of(named)) if commits else {}),
        "command_line": list(sys.argv),
        "directory": str(Path.cwd()),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commits(files: Sequence[Path]) -> dict[str, Any]:
    directory = _directory_of_own(files)
    own = Commit("", dirty=False) if directory is None else commit_of(directory, files)
    package = commit_of_package(Path(__file__).parents[1])
    return {
        "git_commit": own.name,
        "git_dirty": own.dirty,
        "mpisgd_git_commit": package.name,
        "mpisgd_git_dirty": package.dirty,
    }


def _directory_of_own(files: Sequence[Path]) -> Path | None:
    """Return the directory of the started script, of the job file, or of the first file brought."""
    # The present directory may be a stranger's run.
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file and Path(file).stem != "mpisgd" and (spec is None or spec.name.partition(".")[0] != "mpisgd"):
        return Path(file).absolute().parent
    job = next((Path(word) for word in sys.argv[2:3] if not word.startswith("-")), None)
    if job is not None and job.is_file() and not is_of_a_run(job):
        return job.absolute().parent
    return files[0].absolute().parent if files else None
