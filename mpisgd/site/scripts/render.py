"""Batch scripts from templates: `base.sh.jinja` has the common part."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError, nearest
from mpisgd.site import launchers
from mpisgd.site.launchers import Binding, LauncherName
from mpisgd.site.layout import Layout
from mpisgd.site.scripts import durations
from mpisgd.site.scripts.job_options import Request, one_line
from mpisgd.site.scripts.systems import SYSTEMS, WARNING_S, System

_SUBMIT = {"slurm": "sbatch", "lsf": "bsub <", "jsrun": "bsub <", "pbs": "qsub", "flux": "flux batch"}
_ARRAY = {
    "slurm": "#SBATCH --array says how many there are.",
    "pbs": "#PBS -J says how many there are.",
    "flux": "ARRAY_INDEX, from 1, says which.",
}
_TASKS = {"slurm": "--ntasks", "lsf": "slots (-n)", "jsrun": "nodes", "pbs": "mpiprocs", "flux": "RANKS"}
#: The job's number, in bash.
_JOB = {
    "slurm": "$SLURM_JOB_ID",
    "lsf": "$LSB_JOBID",
    "jsrun": "$LSB_JOBID",
    "pbs": "${PBS_JOBID%%.*}",
    "flux": '$(flux job id --to=f58plain "$(flux getattr jobid)")',
}

#: Variables of a user's template -> meaning; docs/howto/batch-systems.md lists them, and a test compares.
VARIABLES = {
    "directives": "all lines that the batch system reads",
    "setup": "modules, lines of --setup, and the virtual environment",
    "launch": "the launcher's command, up to the program",
    "train": "the program: mpisgd train, with all options",
    "run": "the run's directory, with the job's number from bash",
    "name": "the job's name",
    "config": "the path of the configuration",
    "nodes": "number of nodes",
    "ranks": "number of ranks",
    "tasks_per_node": "ranks on each node",
    "shards": "number of shards",
    "learners": "number of learners",
    "gpus_per_node": "GPUs of each node",
    "threads": "cores of each rank",
    "seconds": "the time limit",
}
#: Variables without which a template starts no run.
NEEDED = ("directives", "launch", "train")


@dataclass(frozen=True)
class Script:
    request: Request
    layout: Layout
    command: str
    """For the script's head."""
    venv: str = ""
    seconds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        one_line("command", self.command)
        asked = self.request
        object.__setattr__(self, "seconds", durations.seconds(asked.time))
        unit = "a unit with pbs (a bare number: seconds; elsewhere minutes): 90m, or 01:30:00"
        require(asked.system != "pbs" or not durations.is_bare(asked.time), "time", asked.time, unit)
        two = "" if self.of.title == "LSF" else durations.of_two(asked.time)
        read = "no two numbers" if asked.system == "flux" else "two numbers as minutes and seconds"
        require(
            not two,
            "time",
            asked.time,
            f"three numbers or a unit, {two}: {self.of.title} itself reads {read}, LSF hours and minutes",
        )
        least = WARNING_S + 60
        require(self.seconds > least, "time", asked.time, f"more than {least} s: the job is warned {WARNING_S} s before the end")
        self._check_launcher()
        {"jsrun": self._check_resource_sets, "pbs": self._check_pbs, "flux": self._check_flux}.get(asked.system, lambda: None)()
        if asked.template is not None:
            require(not asked.array, "template", str(asked.template), "none with --array: mpisgd's script makes run directories")
            require(not asked.chain, "template", str(asked.template), "none with --chain: mpisgd's script queues the next link")
        self.of.check_directives(asked.directive, self.text)

    @property
    def of(self) -> System:
        return SYSTEMS[self.request.system]

    @property
    def links(self) -> int:
        return self.request.links if self.request.chain else 0

    @property
    def python(self) -> str:
        return str(Path(self.venv) / "bin" / "python") if self.venv else ""

    @property
    def launcher(self) -> LauncherName:
        asked = self.request
        if asked.launcher is not None:
            return asked.launcher
        if asked.system in ("jsrun", "flux"):
            return asked.system
        if asked.mpi == "mpich":
            return "srun-pmi2" if asked.system == "slurm" else "mpiexec.hydra"
        return "mpirun"

    @property
    def by_roles(self) -> bool:
        """Ranks bind themselves, to cores without other users."""
        return (self.request.binding or ("roles" if self.request.exclusive else "")) == "roles"

    @property
    def _bound(self) -> Binding | None:
        asked = self.request.binding
        return "none" if self.by_roles or asked == "none" else "cores" if asked == "cores" else None

    def _check_launcher(self) -> None:
        asked = self.request
        here = [name for name, each in launchers.LAUNCHERS.items() if asked.system in each.more]
        require(self.launcher in here, "launcher", self.launcher, f"one of {', '.join(here)} with {asked.system}")
        if asked.launcher == "mpirun":
            launchers.check("mpirun", {"openmpi": "Open MPI", "mpich": "MPICH"}[asked.mpi])
        tells = "false: only Open MPI 5, started by mpirun, tells the ranks who has failed"
        require(not asked.fault_tolerant or (self.launcher == "mpirun" and asked.mpi == "openmpi"), "fault_tolerant", True, tells)

    def _check_resource_sets(self) -> None:
        """Require equal nodes: resource sets are alike."""
        layout, gpus, cores = self.layout, self.request.gpus_per_node, self.request.cores_per_node
        require(gpus >= 1, "gpus_per_node", gpus, "at least 1 with jsrun")
        require(not layout.evaluator, "evaluator", True, "false with jsrun: resource sets are alike")
        multiple = f"a multiple of nodes = {layout.nodes} with jsrun: resource sets are alike"
        require(layout.shards % layout.nodes == 0, "shards", layout.shards, multiple)
        every = layout.nodes * gpus
        require(
            layout.learners == every, "learners", layout.learners, f"{every} with jsrun, one for every GPU of {layout.nodes} nodes"
        )
        tasks = f"at least tasks_per_node = {layout.tasks_per_node}, a core for each"
        require(cores >= layout.tasks_per_node, "cores_per_node", cores, tasks)
        protocols = self.request.array
        require(not any(each.split()[0] == "allreduce" for each in protocols), "array", "allreduce", "no allreduce with jsrun")

    def _check_pbs(self) -> None:
        array = self.request.array
        require(len(array) != 1, "array", array, "at least 2 with pbs (no arrays of 1)")
        alone = "false with --array and pbs: an element cannot be queued again alone"
        require(not (array and self.request.chain), "chain", True, alone)

    def _check_flux(self) -> None:
        layout = self.layout
        if self.request.gpus_per_node:
            alike = "with flux and GPUs: ranks per node are equal"
            protocols = self.request.array
            require(not any(each.split()[0] == "allreduce" for each in protocols), "array", "allreduce", f"no allreduce {alike}")
        even = layout.ranks == layout.nodes * layout.tasks_per_node or not self.request.gpus_per_node
        expected = f"ranks in equal numbers on each node with flux and GPUs: {layout.ranks} on {layout.nodes} nodes"
        require(even, "tasks_per_node", layout.tasks_per_node, expected)

    # ------------------------------------------------------------------------------------------------------------ text

    @cached_property
    def text(self) -> str:
        shipped = _environment().get_template(f"{self.request.system}.sh.jinja").render(self._values())
        return shipped if self.request.template is None else self._own(self.request.template, shipped)

    def _values(self) -> dict[str, Any]:
        asked, layout = self.request, self.layout
        one_by_one = bool(asked.array and self.of.one_by_one)
        given = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
        return given | {
            "config": str(asked.config),
            "protocols": asked.array,
            "links": self.links,
            "venv": self.venv,
            "command": self.command,
            "more": asked.more,
            "nodes": layout.nodes,
            "ranks": layout.ranks,
            "tasks_per_node": layout.tasks_per_node,
            "shards": layout.shards,
            "evaluator": int(layout.evaluator),
            "equation": layout.equation,
            "gpus": asked.gpus_per_node,
            "purpose": self._purpose(),
            "seconds": self.seconds,
            "time_hms": durations.hms(self.seconds),
            "time_hm": durations.hm(self.seconds),
            "time_fsd": durations.fsd(self.seconds),
            "warning_s": WARNING_S,
            "select": self._select(),
            "bind": {name: self._bind(name) for name in launchers.LAUNCHERS},
            "by_roles": self.by_roles,
            "submit_how": _SUBMIT[asked.system] + " --env=ARRAY_INDEX=1 --env=ARRAY_JOB=NAME" * one_by_one,
            "submit_each": one_by_one,
            "array_said": _ARRAY.get(asked.system, "#BSUB -J says how many there are."),
            "task_directive": _TASKS[asked.system],
            # Open MPI's mpirun and the system's default launcher are in the templates, open to edits.
            "launch": "" if asked.launcher in (None, "mpirun", "jsrun", "flux") else self._launch('"$RANKS"', '"$OMP_NUM_THREADS"'),
        }

    def _launch(self, ranks: object, threads: object) -> str:
        layout, asked = self.layout, self.request
        counts = {
            "nodes": layout.nodes,
            "per_node": layout.tasks_per_node,
            "gpus": asked.gpus_per_node,
            "cores": asked.cores_per_node,
        }
        return launchers.words(self.launcher, asked.system, self._bound, ranks=ranks, threads=threads, **counts)

    def _bind(self, name: LauncherName) -> str:
        words = launchers.bound(name, self._bound).format(threads='"$OMP_NUM_THREADS"')
        return f" {words}" if words else ""

    def _select(self) -> str:
        """Return PBS's chunks, one per node; the last may be smaller."""
        asked, layout = self.request, self.layout
        more = f":ngpus={asked.gpus_per_node}" * bool(asked.gpus_per_node)
        more += f":mem={asked.memory.lower()}b" * bool(asked.memory) + f":{asked.constraint}" * bool(asked.constraint)
        full, rest = divmod(layout.ranks, layout.tasks_per_node)
        chunks = [(full, layout.tasks_per_node)] * bool(full) + [(1, rest)] * bool(rest)
        return "+".join(
            f"{count}:ncpus={ranks * asked.threads}:mpiprocs={ranks}:ompthreads={asked.threads}{more}" for count, ranks in chunks
        )

    def _purpose(self) -> str:
        chain = ", a chain of jobs until the run is done" * bool(self.links)
        return f"{', an array: one run for each protocol' * bool(self.request.array)}{chain}"

    # -------------------------------------------------------------------------------------------------- the user's own

    def _own(self, path: Path, shipped: str) -> str:
        """Render a user's template. Raises ConfigError: unreadable, or variables unknown or missing."""
        what = f"template = {str(path)!r}"
        try:
            source = path.read_text("utf-8")
            environment = _environment()
            named = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{what}: cannot be read: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{what}: line {error.lineno}: {error.message}") from error
        for name in sorted(named - VARIABLES.keys()):
            raise ConfigError(f"{what}: the variable @{{{name}}} is unknown{nearest(name, VARIABLES)}")
        for name in NEEDED:
            require(name in named, "template", str(path), f"@{{{name}}} in it: {VARIABLES[name]}")
        try:
            return environment.from_string(source).render(self._variables(shipped))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{what}: {error}") from error

    def _variables(self, shipped: str) -> dict[str, Any]:
        asked, layout = self.request, self.layout
        run = f"results/{asked.name}-{_JOB[asked.system]}"
        options = f"{f' --shards {layout.shards}' * bool(layout.shards)}{' --evaluator' * layout.evaluator}"
        options += " --device cuda --placement spread" * bool(asked.gpus_per_node) + " --binding roles" * self.by_roles
        setup = [f"module load {shlex.join(asked.modules.split())}"] * bool(asked.modules) + [*asked.setup]
        setup += [f"source {shlex.quote(f'{self.venv}/bin/activate')}"] * bool(self.venv)
        values = {
            "directives": "\n".join(line for line in shipped.splitlines() if line.startswith(self.of.keyword)),
            "setup": "\n".join(setup),
            "launch": self._launch(layout.ranks, asked.threads),
            "train": f'mpisgd train {shlex.quote(str(asked.config))} --out "{run}"{options}',
            "run": run,
            "name": asked.name,
            "config": shlex.quote(str(asked.config)),
            "nodes": layout.nodes,
            "ranks": layout.ranks,
            "tasks_per_node": layout.tasks_per_node,
            "shards": layout.shards,
            "learners": layout.learners,
            "gpus_per_node": asked.gpus_per_node,
            "threads": asked.threads,
            "seconds": self.seconds,
        }
        assert values.keys() == VARIABLES.keys()
        return values


def _environment() -> jinja2.Environment:
    """Return an environment with delimiters that bash leaves free: lines from %% are jinja's, @{name} is a value.

    Empty lines after jinja's are lost; @{""} keeps a line.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        line_statement_prefix="%%",
        variable_start_string="@{",
        variable_end_string="}",
        block_start_string="@<",
        block_end_string=">@",
        comment_start_string="@/",
        comment_end_string="/@",
        autoescape=False,
    )
    environment.filters |= {"quote": lambda text: shlex.quote(text) if text else "", "quote_always": _double_quoted}
    return environment


def _double_quoted(text: str) -> str:
    """Quote a text against expansion by bash."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
