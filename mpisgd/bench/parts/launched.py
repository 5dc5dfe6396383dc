"""Runs launched by a bench."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config import Config, config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run


def train(config: Config, ranks: int, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Run:
    """Run `mpirun [options] -n ranks mpisgd train`; return the log.

    Raises ConfigError if the launch fails. The DONE marker decides: a launcher's status is 0 also after a lost node (TRAPS 5).
    """
    job = Path(config.out).with_suffix(".toml")
    job.write_text(config_file.dumps(config), "utf-8")
    launcher, *rest = mpirun(ranks)
    command = [launcher, *options, *rest, sys.executable, "-P", "-m", "mpisgd", "train", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | dict(env or {}), check=False)
    if done.returncode != 0 or not (Path(config.out) / schema.DONE).exists():
        raise ConfigError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return Run(Path(config.out))
