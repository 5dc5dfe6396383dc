"""Where a campaign ran, for its result file."""

from __future__ import annotations

import subprocess
from typing import Any

from mpisgd.bench.machine import describe


def machine(ranks: int = 1, mpi: str = "") -> dict[str, Any]:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": done.stdout.strip(), **describe(ranks, mpi)}
