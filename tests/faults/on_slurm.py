"""A campaign on a real SLURM of virtual nodes, which lives as long as the campaign (tests/jobs/slurm.py)."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mpisgd.comm.mpi.launch import mpirun
from tests.faults.campaign import Found, main
from tests.jobs import slurm
from tests.jobs.submitting import NODES

Execute = Callable[[slurm.Slurm, str, random.Random, Path, int], Found]
"""(cluster, MPI as the scripts call it, and what `campaign.Execute` takes) -> what was found."""


def campaign(name: str, about: str, count: int, execute: Execute, argv: list[str]) -> int:
    """`campaign.main` with a cluster; status 2, and why, where there can be none."""
    if reason := slurm.missing():
        print(reason, file=sys.stderr)
        return 2
    told = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=False).stdout
    mpi = "openmpi" if "Open MPI" in told else "mpich"
    with tempfile.TemporaryDirectory() as directory, slurm.cluster(Path(directory), NODES) as cluster:
        return main(name, about, count, lambda generator, path, number: execute(cluster, mpi, generator, path, number), argv)
