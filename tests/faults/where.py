"""Where a campaign ran, for its result file."""

from __future__ import annotations

import subprocess
from typing import Any

from mpisgd.bench.parts.measured import describe


def machine(mpi: str = "") -> dict[str, Any]:
    described = describe(1, mpi)
    del described["ranks"]  # each run has its own
    edited = " and edits" if _git("status", "--porcelain", "--", "mpisgd", "tests") else ""
    return {"commit": _git("rev-parse", "--short", "HEAD") + edited, **described}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()
