"""Launchers, and the MPI libraries whose ranks they start: one table for `submit`, `run` and `doctor`.

Without a common protocol (PMI-1, PMI-2, PMIx), launcher and library start N jobs of 1 rank, not 1 job of N ranks (TRAPS 7). The
table follows documentation; only Open MPI 5 (by mpirun, by srun with PMIx) and MPICH (by its launcher, by srun) were tried.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import mpirun

LauncherName = Literal["mpirun", "srun-pmix", "srun-pmi2", "srun-cray", "jsrun", "aprun", "flux", "mpiexec.hydra"]
Binding = Literal["none", "cores"]
Family = Literal["Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH", "Spectrum MPI"]

#: Words of MPI.Get_library_version() -> family. The first match counts: the texts of Cray and MVAPICH name MPICH, too.
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
    """A way to start ranks.

    Attributes:
        more: batch system -> further words; other systems lack this launcher.
        unasked: default binding in scripts; None = the launcher's own.
        not_by_run: reason against `mpisgd run`.
        fails: family -> reason.
    """

    command: str
    more: Mapping[str, str]
    fits: frozenset[Family]
    fails: Mapping[Family, str] = field(default_factory=dict)
    binds: Mapping[Binding, str] = field(default_factory=dict)
    unasked: Binding | None = None
    not_by_run: str = ""


_SRUN = "srun --mpi={} --kill-on-bad-exit=1 --ntasks={{ranks}} --cpus-per-task={{threads}}"
_SRUN_BINDS: Mapping[Binding, str] = {"none": "--cpu-bind=none", "cores": "--cpu-bind=cores"}
_PMIX_ALONE = "this MPI speaks no PMIx: each rank would find no other"
_HYDRA = "mpiexec.hydra speaks PMI-1 and PMI-2, unknown to this MPI: each rank would find no other"
LAUNCHERS: Mapping[LauncherName, Launcher] = {
    "mpirun": Launcher(
        "mpirun -n {ranks} -x OMP_NUM_THREADS",
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
        binds={"none": "--bind-to none", "cores": "--map-by slot:PE={threads} --bind-to core"},
        unasked="none",
    ),
    "srun-pmix": Launcher(
        _SRUN.format("pmix"),
        {"slurm": ""},
        frozenset({"Open MPI", "MPICH", "Intel MPI"}),
        {"Cray MPICH": _PMIX_ALONE, "Spectrum MPI": "jsrun starts this MPI"},
        binds=_SRUN_BINDS,
    ),
    "srun-pmi2": Launcher(
        _SRUN.format("pmi2"),
        {"slurm": ""},
        frozenset({"MPICH", "MVAPICH", "Intel MPI"}),
        {
            "Open MPI": "Open MPI 5 speaks PMIx alone: srun would start N jobs of one rank, with exit status 0",
            "Spectrum MPI": "jsrun starts this MPI",
        },
        binds=_SRUN_BINDS,
    ),
    "srun-cray": Launcher(
        _SRUN.format("cray_shasta"),
        {"slurm": ""},
        frozenset({"Cray MPICH"}),
        {"Open MPI": "Open MPI speaks PMIx alone: srun-pmix", "Spectrum MPI": "jsrun starts this MPI"},
        binds=_SRUN_BINDS,
    ),
    "jsrun": Launcher(
        "jsrun --launch_distribution packed --smpiargs=-gpu --exit_on_error 1",
        {"jsrun": "--nrs {nodes} --rs_per_host 1 --tasks_per_rs {per_node} --cpu_per_rs {cores} --gpu_per_rs {gpus}"},
        frozenset({"Spectrum MPI"}),
        {"MPICH": _PMIX_ALONE, "Cray MPICH": _PMIX_ALONE, "Intel MPI": _PMIX_ALONE},
        binds={"none": "--bind none", "cores": "--bind packed:{threads}"},
        unasked="cores",
        not_by_run="resource sets belong in a batch script: mpisgd submit --system jsrun",
    ),
    "aprun": Launcher(
        "aprun -n {ranks} -d {threads} -e MPISGD_RANKS={ranks} -e OMP_NUM_THREADS={threads}",
        {"pbs": "-N {per_node}"},
        frozenset({"Cray MPICH"}),
        {name: "ALPS speaks to Cray's MPICH alone" for name in ("Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Spectrum MPI")},
        binds={"none": "-cc none", "cores": "-cc depth"},
        unasked="cores",
    ),
    "flux": Launcher(
        "flux run --ntasks={ranks} --cores-per-task={threads}",
        {"flux": "--nodes={nodes}"},
        frozenset({"Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH"}),
        {"Spectrum MPI": "jsrun starts this MPI"},
        binds={"none": "-o cpu-affinity=off", "cores": "-o cpu-affinity=per-task"},
        not_by_run="flux passes no signals on, and Ctrl-C would not save: mpisgd submit --system flux",
    ),
    "mpiexec.hydra": Launcher(
        "mpiexec.hydra -n {ranks}",
        {
            "slurm": "-ppn {per_node} -bootstrap slurm",
            "lsf": "-ppn {per_node} -rmk lsf -bootstrap lsf",
            "pbs": "-ppn {per_node} -rmk pbs -bootstrap rsh -bootstrap-exec pbs_tmrsh",
        },
        frozenset({"Intel MPI", "MPICH", "MVAPICH"}),
        {"Open MPI": _HYDRA, "Cray MPICH": "srun-cray, aprun or flux starts this MPI", "Spectrum MPI": _HYDRA},
        binds={"none": "-bind-to none", "cores": "-bind-to core:{threads}"},
    ),
}
assert set(LAUNCHERS) == set(get_args(LauncherName))


def family(library: str) -> Family | None:
    """Identify a library by MPI.Get_library_version(), or by the first line."""
    return next((name for words, name in _TOLD.items() if words.lower() in library.lower()), None)


def fitting(owner: Family) -> list[LauncherName]:
    return [name for name, launcher in LAUNCHERS.items() if owner in launcher.fits]


def check(name: LauncherName, library: str) -> None:
    """Raise ConfigError for a launcher known to fail with this library."""
    owner = family(library)
    if owner is not None and owner in LAUNCHERS[name].fails:
        reason = LAUNCHERS[name].fails[owner]
        raise ConfigError(f"launcher = {name!r}: expected one of {', '.join(fitting(owner))} for {owner}: {reason}")


def words(name: LauncherName, system: str, asked: Binding | None, **counts: object) -> str:
    launcher = LAUNCHERS[name]
    parts = (launcher.command, bound(name, asked), launcher.more[system])
    return " ".join(part for part in parts if part).format(**counts)


def bound(name: LauncherName, asked: Binding | None) -> str:
    wanted = asked or LAUNCHERS[name].unasked
    return "" if wanted is None else LAUNCHERS[name].binds[wanted]


def by_run(name: str, ranks: int) -> list[str]:
    """Return the command by which `mpisgd run` starts ranks.

    Raises ConfigError: a launcher unknown, not for `run`, not on the PATH, or unfit for this Python's MPI.
    """
    can = [known for known, each in LAUNCHERS.items() if not each.not_by_run]
    known = next((each for each in LAUNCHERS if each == name), None)
    if known is None or known not in can:
        reason = f": {LAUNCHERS[known].not_by_run}" if known else ""
        raise ConfigError(f"--launcher {name}: expected one of {', '.join(can)}{reason}")
    check(known, library_of(sys.executable))
    if known == "mpirun":
        return mpirun(ranks)
    first, *rest = shlex.split(
        f"{LAUNCHERS[known].command} {bound(known, None)}".format(ranks=ranks, threads=os.environ.get("OMP_NUM_THREADS", "1"))
    )
    found = shutil.which(first)
    if found is None:
        raise ConfigError(f"--launcher {name}: {first} is not on the PATH")
    return [found, *rest]


def library_of(python: str) -> str:
    """Return the version text of a Python's MPI; "" if mpi4py does not load."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
