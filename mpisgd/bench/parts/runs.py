"""Runs launched by a bench, or on its ranks. Imports no MPI."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts.cases import LEARNERS, WARM_UP, Case, config_of
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config import Config, config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI
    from mpisgd.job.finish import Outcome


def launched(config: Config, ranks: int, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Run:
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


def run_of(comm: MPI.Intracomm, directory: Path, case: Case, **special: Any) -> Outcome:
    from mpisgd.job.run import run

    return run(config_of(directory, case, **special), comm)


@contextmanager
def among(comm: MPI.Intracomm, ranks: Sequence[int]) -> Iterator[MPI.Intracomm | None]:
    """Yield a communicator of these ranks, in order; None elsewhere. All ranks enter and leave together."""
    from mpisgd.comm.mpi.wire import Wire

    part = comm.Create_group(comm.Get_group().Incl(list(ranks))) if comm.Get_rank() in ranks else None
    yield part
    if part is not None:
        part.Free()
    Wire(comm, polite=True).meet()


@contextmanager
def scratch(comm: MPI.Intracomm) -> Iterator[Path]:
    """Yield a temporary directory, common to all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(comm.bcast(own, root=0))
        comm.Barrier()


def rate_of(log: Run, case: Case, learners: int = LEARNERS) -> float:
    """Return applied images/s on shard 0, after the warm-up."""
    updates = log.updates[log.updates["shard"] == 0]
    samples, time_s = updates["samples"], updates["time_s"]
    first = int(np.searchsorted(samples, WARM_UP * learners * case.mu))
    return float((samples[-1] - samples[first]) / (time_s[-1] - time_s[first]))
