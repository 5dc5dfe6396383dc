"""Launchers, and the MPI libraries whose ranks they start: one table for `submit`, `run` and `doctor`.

A launcher and a library that do not know each other's way of saying who is who (PMI-1, PMI-2, PMIx) start N jobs of one rank in the
place of one job of N (TRAPS 7). What stands here is what the libraries' and the batch systems' documentation say; only Open MPI 5
by mpirun, and MPICH by its own launcher and by srun, were tried.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mpisgd.base.errors import ConfigError

LauncherName = Literal["mpirun", "srun-pmix", "srun-pmi2", "srun-cray", "jsrun", "aprun", "flux", "mpiexec.hydra"]
Family = Literal["Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH", "Spectrum MPI"]

#: Words of MPI.Get_library_version() -> whose it is; the first that is found counts: Cray's and MVAPICH's name MPICH, too.
_TOLD: Mapping[str, Family] = {
    "CRAY MPICH": "Cray MPICH",
    "Intel(R) MPI": "Intel MPI",
    "MVAPICH": "MVAPICH",
    "Spectrum MPI": "Spectrum MPI",
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
}


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks.

    Attributes:
        command: its words for bash, with {ranks}, {nodes}, {per_node}, {threads}, {gpus} and {cores}.
        more: batch system -> the words that it wants besides; a system that is not here does not have this launcher.
        fits: whose ranks it starts.
        fails: whose it does not, and why.
    """

    command: str
    more: Mapping[str, str]
    fits: frozenset[Family]
    fails: Mapping[Family, str] = field(default_factory=dict)


_SRUN = "srun --mpi={} --kill-on-bad-exit=1 --ntasks={{ranks}} --cpus-per-task={{threads}}"
_PMIX_ALONE = "it speaks no PMIx: it believes that it is alone"
_HYDRA = "it speaks PMI-1 and PMI-2, which is not understood there: each rank believes that it is alone"
LAUNCHERS: Mapping[LauncherName, Launcher] = {
    "mpirun": Launcher(
        "mpirun -n {ranks} --bind-to none -x OMP_NUM_THREADS",
        {
            "slurm": "",
            "lsf": '--hostfile "$LSB_DJOB_HOSTFILE" --prtemca plm_ssh_agent blaunch',
            "pbs": '--hostfile "$PBS_NODEFILE" --prtemca plm_ssh_agent pbs_tmrsh',
        },
        frozenset({"Open MPI"}),
        {
            "MPICH": "this is Open MPI's, and MPICH's own is mpiexec.hydra",
            "Cray MPICH": "there is none of Cray's: srun-cray, aprun or flux",
            "Intel MPI": "this is Open MPI's, and Intel's own is mpiexec.hydra",
            "MVAPICH": "this is Open MPI's, and MVAPICH's own is mpiexec.hydra",
        },
    ),
    "srun-pmix": Launcher(
        _SRUN.format("pmix"),
        {"slurm": ""},
        frozenset({"Open MPI", "MPICH", "Intel MPI"}),
        {"Cray MPICH": _PMIX_ALONE, "Spectrum MPI": "it is started by jsrun"},
    ),
    "srun-pmi2": Launcher(
        _SRUN.format("pmi2"),
        {"slurm": ""},
        frozenset({"MPICH", "MVAPICH", "Intel MPI"}),
        {
            "Open MPI": "Open MPI 5 speaks PMIx alone: srun would start N jobs of one rank, and say 0",
            "Spectrum MPI": "it is started by jsrun",
        },
    ),
    "srun-cray": Launcher(
        _SRUN.format("cray_shasta"),
        {"slurm": ""},
        frozenset({"Cray MPICH"}),
        {"Open MPI": "it speaks PMIx alone: srun-pmix", "Spectrum MPI": "it is started by jsrun"},
    ),
    "jsrun": Launcher(
        "jsrun --nrs {nodes} --rs_per_host 1 --tasks_per_rs {per_node} --cpu_per_rs {cores} --gpu_per_rs {gpus}"
        " --launch_distribution packed --bind packed:{threads} --smpiargs=-gpu --exit_on_error 1",
        {"jsrun": ""},
        frozenset({"Spectrum MPI"}),
        {"MPICH": _PMIX_ALONE, "Cray MPICH": _PMIX_ALONE, "Intel MPI": _PMIX_ALONE},
    ),
    "aprun": Launcher(
        "aprun -n {ranks} -N {per_node} -d {threads} -cc depth -e MPISGD_RANKS={ranks} -e OMP_NUM_THREADS={threads}",
        {"pbs": ""},
        frozenset({"Cray MPICH"}),
        {name: "ALPS speaks to Cray's MPICH alone" for name in ("Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Spectrum MPI")},
    ),
    "flux": Launcher(
        "flux run --ntasks={ranks} --nodes={nodes} --cores-per-task={threads}",
        {"flux": ""},
        frozenset({"Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH"}),
        {"Spectrum MPI": "it is started by jsrun"},
    ),
    "mpiexec.hydra": Launcher(
        "mpiexec.hydra -n {ranks} -ppn {per_node}",
        {
            "slurm": "-bootstrap slurm",
            "lsf": "-rmk lsf -bootstrap lsf",
            "pbs": "-rmk pbs -bootstrap ssh -bootstrap-exec pbs_tmrsh",
        },
        frozenset({"Intel MPI", "MPICH", "MVAPICH"}),
        {"Open MPI": _HYDRA, "Cray MPICH": "it is started by srun-cray, aprun or flux", "Spectrum MPI": _HYDRA},
    ),
}
assert set(LAUNCHERS) == set(get_args(LauncherName))


def family(library: str) -> Family | None:
    """Whose library it is, by MPI.Get_library_version() or its first line; None: nobody's that is known here."""
    return next((name for words, name in _TOLD.items() if words.lower() in library.lower()), None)


def fitting(owner: Family) -> list[LauncherName]:
    """The launchers that start its ranks, in the table's order."""
    return [name for name, launcher in LAUNCHERS.items() if owner in launcher.fits]


def check(name: LauncherName, library: str) -> None:
    """Raises ConfigError where a launcher is known not to start this library's ranks."""
    owner = family(library)
    if owner is not None and owner in LAUNCHERS[name].fails:
        reason = LAUNCHERS[name].fails[owner]
        raise ConfigError(f"launcher = {name!r}: expected one of {', '.join(fitting(owner))} for {owner}: {reason}")


def words(name: LauncherName, system: str = "", **counts: object) -> str:
    """Its command for bash, with these counts, and with what a batch system wants besides ("": none, a shell in an allocation)."""
    launcher = LAUNCHERS[name]
    more = launcher.more.get(system, "")
    return launcher.command.format(**counts) + (f" {more}" if more else "")


def library_of(python: str) -> str:
    """What the MPI of a Python's mpi4py says that it is; "" where it does not load, as on a login node without modules."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
