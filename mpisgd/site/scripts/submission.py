"""From a request to a script and a job."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, kind_of, replace
from mpisgd.site import launchers
from mpisgd.site.layout import Layout, Wishes, fit
from mpisgd.site.scripts.job_options import Request
from mpisgd.site.scripts.render import Script

Read = Callable[[Sequence[str]], Config]
"""Configuration from a file and options of `train`."""


def make(request: Request, read: Read, command: str) -> Script:
    venv = _venv() if request.venv is None else request.venv
    script = Script(request, _layout(request, read), command, venv)
    if request.launcher is not None:
        launchers.check(request.launcher, launchers.library_of(script.python or sys.executable))
    return script


def _layout(request: Request, read: Read) -> Layout:
    """Fit the ranks, equal for all elements of an array."""
    wishes = Wishes(request.nodes, request.tasks_per_node, request.learners, request.gpus_per_node)
    own = read([str(request.config)])
    if not request.array:
        return fit(_with_roles(own, request), wishes)
    layouts = []
    for element in request.array:
        require(bool(element.split()), "array", element, "a protocol, and its options")
        config = read([str(request.config), "--protocol", *element.split()])
        layouts.append(fit(_with_roles(config, request), wishes))
    most = max(layouts, key=lambda layout: layout.ranks)
    learners = {layout.learners for layout in layouts}
    require(len(learners) == 1, "array", request.array, "as many learners for all: give --learners, since allreduce has no shards")
    return most


def _with_roles(config: Config, request: Request) -> Config:
    expected = "'auto' or 'fail-fast'; or --fault-tolerant: mpirun tells of failures"
    require(request.fault_tolerant or config.faults.mode != "tolerant", "faults.mode", config.faults.mode, expected)
    if request.shards is not None and not (request.array and kind_of(config.protocol) == "allreduce"):  # allreduce has none
        config = replace(config, shards=request.shards)
    return replace(config, evaluator=config.evaluator or request.evaluator)


def _venv() -> str:
    """Return this Python's virtual environment; "" without `activate`, as in conda, whose PATH jobs inherit."""
    return sys.prefix if (Path(sys.prefix) / "bin" / "activate").exists() else ""


def submit(script: Script) -> list[str]:
    """Submit; return the job's number, or each element's for systems without arrays.

    Raises ConfigError: no batch system, or a refusal in its words.
    """
    elements = len(script.request.array)
    if script.of.one_by_one is None or not elements:
        return [_handed_over(script)]
    element, told_first = script.of.one_by_one
    jobs: list[str] = []
    for index in range(1, elements + 1):
        more = [element.format(index=index), *(told_first.format(first=job) for job in jobs[:1])]
        try:
            jobs.append(_handed_over(script, more))
        except ConfigError as error:
            queued = f"; queued before this, and still there: {' '.join(jobs)}" * bool(jobs)
            raise ConfigError(f"element {index} of {elements}: {error}{queued}") from error
    return jobs


def _handed_over(script: Script, more: Sequence[str] = ()) -> str:
    words = [*script.of.submit, *more]
    try:
        done = subprocess.run(words, input=script.text, capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started ({error}); --dry-run prints the script") from error
    if done.returncode != 0:
        raise ConfigError(f"{words[0]} refuses: {(done.stderr or done.stdout).strip()}")
    found = _number(script.request.system, done.stdout)
    if found is None:
        raise ConfigError(f"{words[0]} took the job, but gave no number: {done.stdout.strip()!r}")
    return found


def _number(system: str, told: str) -> str | None:
    """Parse `17;cluster` (SLURM), `Job <17> is submitted` (LSF), `17.server`, `17[].server` (PBS), or `ƒ3XyZ` (Flux, to f3XyZ)."""
    if system == "flux":
        found = re.search(r"^[ƒf]([1-9A-HJ-NP-Za-km-z]+)\s*$", told, re.MULTILINE)
        return f"f{found[1]}" if found else None
    found = re.search(r"^(\d+)|Job <(\d+)>", told, re.MULTILINE)
    return (found[1] or found[2]) if found else None
