"""A batch script from its template: `base.sh.jinja` has what all systems share, `slurm`, `lsf` and `jsrun` what is their own."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import jinja2

from mpisgd.base.checks import at_least, require
from mpisgd.site.layout import Layout
from mpisgd.site.scripts import durations

System = Literal["slurm", "lsf", "jsrun"]

WARNING_S = 120
"""Seconds before the time limit at which the batch system warns the script; SLURM's warning can come 60 s early (TRAPS 7)."""


@dataclass(frozen=True)
class Script:
    """All that a script says; `text` is the script."""

    system: System
    layout: Layout
    config: str
    """Path of the configuration, as the job will see it from the directory it is submitted from."""
    command: str
    """The command that made the script, for its head."""
    name: str = "mpisgd"
    gpus_per_node: int = 0
    threads: int = 1
    cores_per_node: int = 42
    time: str = "01:00"
    queue: str = ""
    account: str = ""
    modules: str = ""
    venv: str = ""
    mpi: str = "openmpi"
    fault_tolerant: bool = False
    protocols: tuple[str, ...] = ()
    links: int = 0
    seconds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Raises ConfigError: what a directive cannot hold, or what the system cannot do."""
        at_least(self, "", threads=1, cores_per_node=1, links=0)
        require(bool(re.fullmatch(r"[\w.-]+", self.name)), "name", self.name, "letters, digits, '.', '_' and '-'")
        for what in ("queue", "account"):
            value = getattr(self, what)
            require(bool(re.fullmatch(r"[^\s'\"$`\\]*", value)), what, value, "one word without quotes")
        for what in ("config", "command", "modules", "venv", "mpi", "protocols"):
            value = getattr(self, what)
            for each in [value] if isinstance(value, str) else value:
                one_line(what, each)
        object.__setattr__(self, "seconds", durations.seconds(self.time))
        least = WARNING_S + 60
        require(
            self.seconds > least, "time", self.time, f"more than {least} s: the batch system warns the job so long before the end"
        )
        tells = "false: only Open MPI 5, started by mpirun, tells the ranks who has failed"
        require(not self.fault_tolerant or (self.system != "jsrun" and self.mpi == "openmpi"), "fault_tolerant", True, tells)
        if self.system == "jsrun":
            self._check_resource_sets()

    def _check_resource_sets(self) -> None:
        """Resource sets are alike: what is on one node is on all."""
        layout = self.layout
        require(self.gpus_per_node >= 1, "gpus_per_node", self.gpus_per_node, "at least 1 with jsrun")
        require(not layout.evaluator, "evaluator", True, "false with jsrun, whose resource sets are alike")
        multiple = f"a multiple of nodes = {layout.nodes} with jsrun, whose resource sets are alike"
        require(layout.shards % layout.nodes == 0, "shards", layout.shards, multiple)
        every = layout.nodes * self.gpus_per_node
        require(
            layout.learners == every, "learners", layout.learners, f"{every} with jsrun, one for every GPU of {layout.nodes} nodes"
        )
        tasks = f"at least tasks_per_node = {layout.tasks_per_node}, a core for each"
        require(self.cores_per_node >= layout.tasks_per_node, "cores_per_node", self.cores_per_node, tasks)
        require(not any(each.split()[0] == "allreduce" for each in self.protocols), "array", "allreduce", "none of it with jsrun")

    @cached_property
    def text(self) -> str:
        layout = self.layout
        return (
            _templates()
            .get_template(f"{self.system}.sh.jinja")
            .render(
                **{name: getattr(self, name) for name in self.__dataclass_fields__},
                nodes=layout.nodes,
                ranks=layout.ranks,
                tasks_per_node=layout.tasks_per_node,
                shards=layout.shards,
                evaluator=int(layout.evaluator),
                equation=layout.equation,
                gpus=self.gpus_per_node,
                purpose=self._purpose(),
                time_hms=durations.hms(self.seconds),
                time_hm=durations.hm(self.seconds),
                warning_s=WARNING_S,
                array_directive="#SBATCH --array" if self.system == "slurm" else "#BSUB -J",
                task_directive={"slurm": "--ntasks", "lsf": "slots (-n)", "jsrun": "nodes"}[self.system],
            )
        )

    def _purpose(self) -> str:
        chain = ", a chain of jobs until the run is done" * bool(self.links)
        return f"{', an array: one run for each protocol' * bool(self.protocols)}{chain}"


def one_line(what: str, text: str) -> None:
    """Raises ConfigError where a text would end a comment or a directive of the script: what follows would be run."""
    require(not re.search(r"[\x00-\x1f\x7f]", text), what, text, "one line without control characters")


def _templates() -> jinja2.Environment:
    """Delimiters that bash leaves free: a line that begins with %% is jinja's, and @{name} a value.

    Empty lines after a line of jinja's are lost; @{""} is one that is not.
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
    """In double quotes, in which bash keeps all else as it is."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
