"""What a user asks a batch system for; each value is checked here, before a line of a script is written."""

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
    """Submit a run to a batch system, or print the script with --dry-run, to be edited and submitted by hand.

    Ranks = shards + learners (+ 1 evaluator). Give two of --nodes, --tasks-per-node and --learners, or --gpus-per-node, and the
    rest is worked out. The run's directory is results/<name>-<job id>.
    """

    config: tyro.conf.Positional[Path]
    """The run's configuration, a TOML file; jobs see it by this path, from the directory in which they are submitted."""
    system: SystemName = "slurm"
    """slurm; lsf; jsrun: LSF on POWER nodes, where jsrun starts the ranks in resource sets; pbs: PBS Professional
    or OpenPBS; flux."""
    nodes: int | None = None
    """Nodes; default: as few as hold the ranks, or 1."""
    tasks_per_node: int | None = None
    """Ranks on each node; the last may have fewer."""
    learners: int | None = None
    """Ranks that compute gradients; default: all that the others leave, or one for every GPU."""
    gpus_per_node: int = 0
    """GPUs of each node, one for each learner; 0 = learners compute on the CPU."""
    shards: int | None = None
    """Shards, in place of the configuration's."""
    evaluator: bool = False
    """Give a rank to evaluation, also where the configuration does not."""
    threads: int = 1
    """Cores of each rank (jsrun: see --cores-per-node)."""
    binding: Literal["none", "cores", "roles"] | None = None
    """Bind ranks to cores. none; cores: the launcher gives each rank --threads of its own; roles: it gives a node's to all of its
    ranks, and they share them out, one to each shard, the rest to those that compute. Default: roles with --exclusive; else
    what the launcher does, none for Open MPI's mpirun."""
    cores_per_node: int = 42
    """jsrun: cores of a node, dealt to its ranks."""
    memory: str = ""
    """Memory of each node, 64G say (LSF: as the site counts it, by node or by slot); default: the site's."""
    exclusive: bool = False
    """Whole nodes, shared with no other job."""
    time: str = "1h"
    """Time limit: 90m, 1.5h, 2d, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, or minutes.
    LSF's own hours:minutes is for LSF alone: to SLURM and PBS two numbers are minutes:seconds."""
    queue: Annotated[str, tyro.conf.arg(aliases=["--partition"])] = ""
    """The queue, or partition (SLURM); default: the site's."""
    account: Annotated[str, tyro.conf.arg(aliases=["--project", "--bank"])] = ""
    """The account (SLURM, PBS), project (LSF) or bank (Flux) that pays."""
    qos: str = ""
    """Quality of service (SLURM)."""
    constraint: str = ""
    """Which nodes: features (SLURM), a select string (LSF), a resource, NAME=VALUE (PBS), properties (Flux); one word."""
    reservation: str = ""
    """A reservation (SLURM, LSF)."""
    dependency: str = ""
    """Wait for other jobs: afterok:4711, after:, afterany: or afternotok:, with one job's number or more."""
    mail: str = ""
    """The address to which the batch system writes."""
    mail_when: tuple[Literal["begin", "end", "fail"], ...] = ()
    """When it does; default: end fail."""
    directive: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """One more line for the batch system, as it reads it, without #SBATCH and its like; may be given again."""
    name: str = "mpisgd"
    """The job's name."""
    array: tuple[str, ...] = ()
    """An array of jobs, one for each protocol, with its options in quotes: hardsync "softsync --protocol.n 4" async."""
    chain: bool = False
    """A chain: the job is queued again until the run is done, and goes on from the checkpoint that it writes when its time is
    nearly over. Where a node is lost there is no warning: then only checkpoint.every_updates > 0 has kept something."""
    links: int = 20
    """Most links of a chain."""
    modules: str = ""
    """Load these modules first (`module load`), in quotes."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A line of bash that the job executes as it stands, after the modules; may be given again."""
    venv: str | None = None
    """The virtual environment in which mpisgd is installed; default: this one."""
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    """The MPI that mpi4py runs on; `mpisgd doctor` says which."""
    launcher: LauncherName | None = None
    """What starts the ranks; default: mpirun for Open MPI, srun-pmi2 or mpiexec for MPICH, jsrun, flux. `mpisgd doctor` says which
    fits."""
    template: Path | None = None
    """A template of your own for the script: see docs/howto/batch-systems.md for what it may say."""
    fault_tolerant: bool = False
    """Go on without learners that die or hang; needs Open MPI 5."""

    def __post_init__(self) -> None:
        """Raises ConfigError: a value that would break out of its line, or has another form, or that the system does not know."""
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
        """Lines for the batch system besides those that every script has, without their keyword."""
        system = systems.SYSTEMS[self.system]
        lines = [
            line
            for name in ("memory", "qos", "constraint", "reservation", "exclusive")
            for line in system.lines(name, getattr(self, name))
        ]
        lines += system.depends(self.dependency) if self.dependency else []
        return [*lines, *system.mails(self.mail, self.mail_when or ("end", "fail")), *self.directive]


def one_line(what: str, text: str) -> None:
    """Raises ConfigError where a text would end a comment or a directive of the script: what follows would be run."""
    require(not re.search(r"[\x00-\x1f\x7f]", text), what, text, "one line without control characters")
