"""A checkout whose scripts are submitted to the cluster of virtual nodes (slurm.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mpisgd.comm.mpi.launch import environment, mpirun
from tests.jobs import slurm
from tests.jobs.checkout import Checkout
from tests.jobs.golden import JOBS

NODES = ("n1", "n2", "n3", "n4")
#: Eight ranks on them, a shard on each.
FOUR_NODES = {"nodes": 4, "ntasks": 8, "ntasks_per_node": 2, "SHARDS": 4, "EVALUATOR": 0}
#: One rank on each: two shards, two learners.
ONE_EACH = FOUR_NODES | {"ntasks": 4, "ntasks_per_node": 1, "SHARDS": 2}


class Submitting(Checkout):
    """What a user of that cluster has."""

    def __init__(self, directory: Path, cluster: slurm.Slurm, mpi: str) -> None:
        super().__init__(directory, mpi)
        self.cluster = cluster

    @property
    def environment(self) -> dict[str, str]:
        return environment() | self.cluster.environment | {"LEAVE_S": "12"}

    def stand_in(self, text: str) -> None:
        """What the ranks run in the place of mpisgd, on every node.

        Open MPI's daemons look for programs beside themselves first, and there may be the real one: so it is called by its path.
        """
        self.install(text)
        self.install(f'exec "{mpirun(1)[0]}" "${{@/#mpisgd/{self.programs / "mpisgd"}}}"\n', "mpirun")

    def submit(self, script: str) -> str:
        """`sbatch`; the job's number."""
        words = ["sbatch", "--parsable", f"jobs/{script}"]
        return subprocess.run(
            words, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout.strip()

    def mpisgd(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """A command of the user's, on the cluster's login node."""
        env = self.environment | {"PYTHONPATH": str(JOBS.parent)}
        command = [sys.executable, "-m", "mpisgd", *words]
        done = subprocess.run(command, cwd=self.directory, env=env, capture_output=True, text=True, check=False, timeout=3000)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def output(self, job: str) -> str:
        file = self.directory / f"mpisgd-{job}.out"
        return file.read_text() if file.exists() else ""

    def start_endless(self, **settings: object) -> str:
        """A run that would take for ever, on four nodes, as soon as it trains; its number."""
        self.configure('epochs = 1000000\nplacement = "spread"')
        self.edit("slurm-cpu.sbatch", **ONE_EACH, **settings)
        job = self.submit("slurm-cpu.sbatch")
        slurm.wait_for(lambda: list(self.run(job).glob("shard-001*.h5")), 120, "training", lambda: self.output(job))
        return job

    def ranks(self) -> list[str]:
        """The commands of all ranks on all nodes that are up."""
        found = []
        for pid in [pid for node in self.cluster.nodes if node in self.cluster.daemons for pid in self.cluster.processes(node)]:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"mpisgd" in words:
                found.append(b" ".join(words).decode())
        return found
