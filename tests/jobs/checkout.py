"""A copy of jobs/ whose scripts can be edited and run, beside an environment in which there is an `mpisgd`."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

from mpisgd.config import config_file
from mpisgd.exchange import roles
from tests.jobs.golden import JOBS


class Checkout:
    """What a user has who submits."""

    def __init__(self, directory: Path, mpi: str) -> None:
        self.directory, self.mpi = directory, mpi
        shutil.copytree(JOBS, directory / "jobs")
        self.programs = directory / ".venv" / "bin"
        self.programs.mkdir(parents=True)
        path = f"{self.programs}:{Path(sys.executable).parent}"
        # The nodes are one machine, whose cores their ranks share without knowing it.
        settings = f'PATH="{path}:$PATH" PYTHONPATH="{JOBS.parent}" MPISGD_WAIT=polite'
        (self.programs / "activate").write_text(f"export {settings}\n")
        self.install(f'exec "{sys.executable}" -m mpisgd "$@"\n')

    def install(self, text: str, program: str = "mpisgd") -> None:
        """What the ranks run, or something else that the scripts find on their PATH."""
        (self.programs / program).write_text(f"#!/bin/bash\n{text}")
        (self.programs / program).chmod(0o755)

    def configure(self, more: str) -> None:
        """Keys before those of jobs/job.toml."""
        file = self.directory / "jobs" / "job.toml"
        lines = [line for line in file.read_text().splitlines() if not line.startswith("epochs")]
        file.write_text("\n".join([more, *lines, ""]))

    def edit(self, script: str, **settings: object) -> None:
        """Edit a script's block, as a user would: SLURM's directives by their names with `_` for `-`, settings by theirs."""
        file = self.directory / "jobs" / script
        text = file.read_text()
        for name, value in ({"MPI": self.mpi} | settings).items():
            before = f"#SBATCH --{name.replace('_', '-')}=" if name.islower() else f"{name}="
            text, found = re.subn(rf"^{re.escape(before)}.*$", f"{before}{value}", text, flags=re.MULTILINE)
            assert found == 1, f"{script}: {before}"
        file.write_text(text)

    def run(self, job: str) -> Path:
        return self.directory / "results" / f"mpisgd-{job}"


def hosts_of(run: Path) -> tuple[tuple[str, ...], roles.Roles]:
    """The host of each rank, and the roles, as the run wrote them down."""
    hosts = tomllib.loads((run / "config.toml").read_text())["environment"]["hosts"]
    return tuple(hosts), roles.of_job(config_file.read(run / "config.toml"), hosts)
