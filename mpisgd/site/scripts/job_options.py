"""Options of a job, each checked before a script is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpisgd.base.checks import at_least, require
from mpisgd.site.launchers import LauncherName
from mpisgd.site.scripts import systems
from mpisgd.site.scripts.systems import SystemName

_WORD = r"[^\s'\"$`\\\x00-\x1f\x7f]*"


@dataclass(frozen=True)
class Request:
    """Submit a run to a batch system, or print the script with --dry-run, to edit and submit by hand.

    Ranks = shards + learners (+ 1 evaluator). Give two of --nodes, --tasks-per-node and --learners, or --gpus-per-node; the rest is
    derived. The run's directory is results/<name>-<job id>.
    """

    config: tyro.conf.Positional[Path]
    """The run's configuration, a TOML file; jobs open this path from the directory of submission."""
    system: SystemName = "slurm"
    """slurm; lsf; jsrun: LSF on POWER nodes, where jsrun starts the ranks in resource sets; pbs: PBS Professional or OpenPBS;
    flux."""
    nodes: int | None = None
    """Nodes; default: the fewest for the ranks, or 1."""
    tasks_per_node: int | None = None
    """Ranks per node; the last node may have fewer."""
    learners: int | None = None
    """Ranks that compute gradients; default: all remaining ranks, or one per GPU."""
    gpus_per_node: int = 0
    """GPUs per node, one per learner; 0 = learners compute on the CPU."""
    shards: int | None = None
    """Shards, in place of the configuration's."""
    evaluator: bool = False
    """Give evaluation a rank, whatever the configuration says."""
    threads: int = 1
    """Cores per rank (jsrun: see --cores-per-node)."""
    binding: Literal["none", "cores", "roles"] | None = None
    """Bind ranks to cores. none; cores: the launcher gives each rank --threads cores; roles: the ranks of a node divide all
    cores of the node, one per shard, the rest for computing ranks. Default: roles with --exclusive, else the launcher's, none
    for Open MPI's mpirun."""
    cores_per_node: int = 42
    """jsrun: cores per node, dealt to the ranks."""
    memory: str = ""
    """Memory per node, e.g. 64G (LSF: per node or slot, as the site counts); default: the site's."""
    exclusive: bool = False
    """Whole nodes, shared with no other job."""
    time: str = "1h"
    """Time limit: 90m, 1.5h, 2d, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, or minutes.
    hours:minutes is for LSF alone: SLURM and PBS read minutes:seconds."""
    queue: Annotated[str, tyro.conf.arg(aliases=["--partition"])] = ""
    """Queue, or partition (SLURM); default: the site's."""
    account: Annotated[str, tyro.conf.arg(aliases=["--project", "--bank"])] = ""
    """Account (SLURM, PBS), project (LSF) or bank (Flux) to charge."""
    qos: str = ""
    """Quality of service (SLURM)."""
    constraint: str = ""
    """Nodes by features (SLURM), select string (LSF), resource NAME=VALUE (PBS) or properties (Flux); one word."""
    reservation: str = ""
    """Reservation (SLURM, LSF)."""
    dependency: str = ""
    """Wait for other jobs: afterok:4711, after:, afterany: or afternotok:, with one or more numbers."""
    mail: str = ""
    """Address for mail from the batch system."""
    mail_when: tuple[Literal["begin", "end", "fail"], ...] = ()
    """Occasions for mail; default: end fail."""
    directive: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further line for the batch system, verbatim, without #SBATCH or another keyword; may be repeated."""
    name: str = "mpisgd"
    """Name of the job."""
    array: tuple[str, ...] = ()
    """Array of jobs, one per protocol with options in quotes: hardsync "softsync --protocol.n 4" async."""
    chain: bool = False
    """Queue the job again until the run is done, from a checkpoint written near the end of each job's time. A lost node gives no
    warning: then only checkpoint.every_updates > 0 has saved progress."""
    links: int = 20
    """Most links of a chain."""
    modules: str = ""
    """Modules to load first (`module load`), in quotes."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Line of bash after the modules, verbatim; may be repeated."""
    venv: str | None = None
    """Virtual environment with mpisgd; default: the present environment."""
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    """MPI of mpi4py; `mpisgd doctor` names it."""
    launcher: LauncherName | None = None
    """Launcher of ranks; default: mpirun for Open MPI, srun-pmi2 or mpiexec for MPICH, jsrun, flux. `mpisgd doctor` names
    fitting launchers."""
    template: Path | None = None
    """Your template of the script; docs/howto/batch-systems.md lists its variables."""
    fault_tolerant: bool = False
    """Continue without learners that die or hang; needs Open MPI 5."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that breaks out of its line, is malformed, or unknown to the system."""
        at_least(self, "", links=1, threads=1, cores_per_node=1)
        require(bool(re.fullmatch(r"[\w.-]+", self.name)), "name", self.name, "letters, digits, '.', '_' and '-'")
        for what in ("queue", "account", "qos", "constraint", "reservation"):
            value = getattr(self, what)
            require(bool(re.fullmatch(_WORD, value)), what, value, "one word without quotes")
        require(bool(re.fullmatch(r"([1-9]\d*[KMGT])?", self.memory)), "memory", self.memory, "a number with K, M, G or T: 64G")
        address = r"([\w.+-]+@[\w.-]+)?"
        require(bool(re.fullmatch(address, self.mail, re.ASCII)), "mail", self.mail, "an address: somebody@example.org")
        require(bool(self.mail) or not self.mail_when, "mail_when", self.mail_when, "none without --mail")
        if self.dependency:
            systems.split_dependency(self.dependency)
        for what in ("config", "modules", "venv", "array", "directive", "setup", "template"):
            value = getattr(self, what)
            for each in value if isinstance(value, tuple) else [str(value)]:
                one_line(what, each)
        for each in self.directive:
            require(each.startswith("-"), "directive", each, "an option of the batch system, such as --gres=x or -l x=1")
        systems.SYSTEMS[self.system].refuse_what_it_lacks({name: getattr(self, name) for name in self.__dataclass_fields__})

    @property
    def more(self) -> list[str]:
        system = systems.SYSTEMS[self.system]
        lines = [
            line
            for name in ("memory", "qos", "constraint", "reservation", "exclusive")
            for line in system.lines(name, getattr(self, name))
        ]
        lines += system.depends(self.dependency) if self.dependency else []
        return [*lines, *system.mails(self.mail, self.mail_when or ("end", "fail")), *self.directive]


def one_line(what: str, text: str) -> None:
    """Raise ConfigError for control characters: bash would run text after a line end."""
    require(not re.search(r"[\x00-\x1f\x7f]", text), what, text, "one line without control characters")
