"""`mpirun -n RANKS mpisgd bench WHAT`: measure this machine; ratios side by side in one run, one JSON file per bench."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mpisgd.errors import EXIT_OK, EXIT_USAGE, ConfigError, nearest
from mpisgd.guard import failing_fast, launched_rank

BENCHES = {"wire": "the push+pull cycle with the update, over raw Send+Recv and the update's least memory traffic (2 ranks)"}


@dataclass(frozen=True)
class WireOptions:
    """The push+pull cycle, with the update, against raw Send+Recv of the same bytes: mpirun -n 2 mpisgd bench wire."""

    sizes: tuple[int, ...] = (350_000, 4_000_000, 44_000_000, 289_000_000)
    """Bytes of the gradient."""
    repetitions: int = 5
    """Interleaved repetitions; median and range are told."""
    out: str = "results/bench"
    """Where the JSON file goes."""
