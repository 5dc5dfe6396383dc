"""`mpisgd submit job.toml`: a batch script for SLURM or LSF, with the nodes and ranks that the roles need."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpisgd.base.checks import at_least, require
from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.config import Config, hints, kind_of, replace
from mpisgd.site.layout import Layout, Wishes, fit
from mpisgd.site.scripts.render import Script, System, one_line


@dataclass(frozen=True)
class Options:
    """Submit a run to SLURM or LSF, or print the script with --dry-run, to be edited and submitted by hand.

    Ranks = shards + learners (+ 1 evaluator). Give two of --nodes, --tasks-per-node and --learners, or --gpus-per-node, and the
    rest is worked out. The run's directory is results/<name>-<job id>.
    """

    config: tyro.conf.Positional[Path]
    """The run's configuration, a TOML file; jobs see it by this path, from the directory in which they are submitted."""
    system: System = "slurm"
    """slurm; lsf; jsrun: LSF on POWER nodes, where jsrun starts the ranks in resource sets."""
    dry_run: bool = False
    """Print the script and do nothing."""
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
    cores_per_node: int = 42
    """jsrun: cores of a node, dealt to its ranks."""
    time: str = "01:00"
    """Time limit: hours:minutes, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, minutes, or with a
    unit, as in 90m or 1.5h. Two numbers are hours and minutes on every system."""
    queue: Annotated[str, tyro.conf.arg(aliases=["--partition"])] = ""
    """The queue (LSF) or partition (SLURM); default: the site's."""
    account: Annotated[str, tyro.conf.arg(aliases=["--project"])] = ""
    """The account (SLURM) or project (LSF) that pays."""
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
    venv: str | None = None
    """The virtual environment in which mpisgd is installed; default: this one."""
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    """The MPI that mpi4py runs on; `mpisgd doctor` says which."""
    fault_tolerant: bool = False
    """Go on without learners that die or hang; needs Open MPI 5."""


#: Options that a script has under the same names.
_ALIKE = ("name", "gpus_per_node", "threads", "cores_per_node", "time", "queue", "account", "modules", "mpi", "fault_tolerant")


def main(argv: list[str]) -> int:
    """Returns the exit status. Raises ConfigError: counts that cannot be, or a batch system that refuses; SystemExit from tyro."""
    found = hints.foreign(argv, {*(item.name for item in fields(Options)), "partition", "project"}, hints.SUBMIT)
    if found is not None:
        raise ConfigError(f"unknown option {found[0]}: {found[1]}")
    options = tyro.cli(Options, args=argv, prog="mpisgd submit")
    script = make(options, argv)
    if options.dry_run:
        print(script.text, end="")
        return EXIT_OK
    job = submit(script)
    elements = "-*" if options.array else ""
    print(
        f"job {job}: {script.layout.ranks} ranks on {script.layout.nodes} nodes; runs go to results/{options.name}-{job}{elements}"
    )
    return EXIT_OK


def make(options: Options, argv: list[str]) -> Script:
    """The script that the options mean; raises ConfigError."""
    at_least(options, "", links=1)
    return Script(
        system=options.system,
        layout=_layout(options),
        config=str(options.config),
        command=shlex.join(["mpisgd", "submit", *(word for word in argv if word != "--dry-run")]),
        **{name: getattr(options, name) for name in _ALIKE},
        venv=_venv() if options.venv is None else options.venv,
        protocols=options.array,
        links=options.links if options.chain else 0,
    )


def _layout(options: Options) -> Layout:
    """Fit the ranks, the same for every element of an array; each element's protocol must go with them."""
    from mpisgd.command_line.options import parse

    wishes = Wishes(options.nodes, options.tasks_per_node, options.learners, options.gpus_per_node)
    own, _ = parse([str(options.config)], "mpisgd submit")
    if not options.array:
        return fit(_with_roles(own, options), wishes)
    layouts = []
    for element in options.array:
        require(bool(element.split()), "array", element, "a protocol, and its options")
        one_line("array", element)
        config, _ = parse([str(options.config), "--protocol", *element.split()], "mpisgd submit --array")
        layouts.append(fit(_with_roles(config, options), wishes))
    most = max(layouts, key=lambda layout: layout.ranks)
    learners = {layout.learners for layout in layouts}
    require(len(learners) == 1, "array", options.array, "as many learners for all: give --learners, since allreduce has no shards")
    return most


def _with_roles(config: Config, options: Options) -> Config:
    """The configuration with which the script will start its ranks."""
    expected = "'auto' or 'fail-fast'; or --fault-tolerant, which has mpirun tell of failures"
    require(options.fault_tolerant or config.faults.mode != "tolerant", "faults.mode", config.faults.mode, expected)
    if options.shards is not None and not (options.array and kind_of(config.protocol) == "allreduce"):  # which is given none there
        config = replace(config, shards=options.shards)
    return replace(config, evaluator=config.evaluator or options.evaluator)


def _venv() -> str:
    """The virtual environment of this Python; empty where there is none to activate, as in conda's, whose PATH jobs inherit."""
    return sys.prefix if (Path(sys.prefix) / "bin" / "activate").exists() else ""


def submit(script: Script) -> str:
    """Hand the script to the batch system; its number of the job.

    Raises ConfigError: the batch system is not here, or refuses, in its own words.
    """
    command = ["sbatch", "--parsable"] if script.system == "slurm" else ["bsub"]
    try:
        done = subprocess.run(command, input=script.text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started ({error}); --dry-run prints the script") from error
    if done.returncode != 0:
        raise ConfigError(f"{command[0]} refuses: {(done.stderr or done.stdout).strip()}")
    found = re.search(r"^(\d+)|Job <(\d+)>", done.stdout, re.MULTILINE)
    if found is None:
        raise ConfigError(f"{command[0]} took the job, but gave no number: {done.stdout.strip()!r}")
    return found[1] or found[2]
