"""Alternatives in turn, median and range, and JSON files with their machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from mpisgd.base.git import commit_of_package
from mpisgd.base.version import __version__

OFF = "off"
Spread = Mapping[str, float]
"""median, min, max."""


def in_turn(ways: Sequence[str], repetitions: int, *, told: bool = True) -> Iterator[str]:
    """Yield all ways per repetition, rotated each time; show progress on a terminal, if `told`."""
    turns = [way for number in range(repetitions) for way in (*ways[number % len(ways) :], *ways[: number % len(ways)])]
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not (told and terminal.is_terminal)) as progress:
        task = progress.add_task("", total=len(turns))
        for way in turns:
            progress.update(task, description=way)
            yield way
            progress.advance(task)


def spread(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values)}


def over(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return ratios of neighbouring repetitions."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def over_off(measured: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Return the ratios of all others to OFF."""
    return {name: over(values, measured[OFF]) for name, values in measured.items() if name != OFF}


def show(value: Spread, digits: int = 2, factor: float = 1.0) -> str:
    middle, low, high = (value[key] * factor for key in ("median", "min", "max"))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def describe(ranks: int, mpi: str = "") -> dict[str, Any]:
    """Return processor, cores and versions; the load shows other work on the machine."""
    return {
        "commit": commit_of_package(Path(__file__).parents[2]).name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if ranks == 1 else os.cpu_count(),
        "ranks": ranks,
        "mpi": mpi,
        "versions": {"mpisgd": __version__, "torch": str(torch.__version__), "numpy": np.__version__},
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu\t")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write(path: Path, contents: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=1) + "\n")
