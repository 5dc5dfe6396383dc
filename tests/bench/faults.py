"""`python -m tests.bench faults`: hardsync with all that makes a job survive, against the same without any of it.

Each run is a launch of its own, for only the launcher switches failures' notices (ULFM) on: `mpirun --with-ft ulfm`, Open MPI 5.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpisgd.bench.checkpoint import Tally, lines_of, seen
from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, config_of
from mpisgd.bench.parts.measured import OFF, in_turn
from mpisgd.config import CheckpointOptions, FaultOptions, LogOptions

__all__ = ["lines_of", "measure"]

TOLERANT = ("--with-ft", "ulfm")
LONGER = 6
"""Times the updates of the other benches: what a launch costs is not timed, but long."""


def measure(repetitions: int, every_updates: int) -> Iterator[dict[str, Any]]:
    """Images/s in all ways. Raises ConfigError where a launch fails: the launcher is not Open MPI 5's, say."""
    silent, watched = LogOptions(progress="off", quiet_s=0), LogOptions(progress="off")
    tolerant, checkpoints = FaultOptions(mode="tolerant"), CheckpointOptions(every_updates=every_updates)
    ways: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        OFF: ((), {"log": silent}),
        "checkpoints, watchdog": ((), {"log": watched, "checkpoint": checkpoints}),
        "checkpoints, watchdog, fault-tolerant": (TOLERANT, {"log": watched, "checkpoint": checkpoints, "faults": tolerant}),
    }
    for each in (CASES["cnn-16"], CASES["mlp-16"]):
        case = replace(each, updates=LONGER * each.updates)
        tally = Tally(case, list(ways))
        for name in in_turn(list(ways), repetitions):
            with tempfile.TemporaryDirectory() as directory:
                options, special = ways[name]
                tally.add(name, *seen(runs.launched(config_of(Path(directory), case, **special), 1 + LEARNERS, options)))
        yield tally.row() | {"every_updates": every_updates}
