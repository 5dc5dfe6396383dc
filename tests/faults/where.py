"""Where a campaign ran, for its result file."""

from __future__ import annotations

import subprocess
from typing import Any

from mpisgd.bench.machine import describe


def machine(mpi: str = "") -> dict[str, Any]:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    described = describe(1, mpi)
    del described["ranks"]  # each run has its own
    return {"commit": done.stdout.strip(), **described}
