"""JSON files of benchmarks, with their machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base.git import commit_of_package
from mpisgd.base.version import __version__


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
