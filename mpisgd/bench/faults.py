"""`bench faults`: hardsync with all that makes a job survive, against the same without any of it.

Each run is a launch of its own, for only the launcher switches failures' notices (ULFM) on: `mpirun --with-ft ulfm`, Open MPI 5.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpisgd import config_file
from mpisgd.bench.cases import CASES, LEARNERS, Case, config_of
from mpisgd.bench.on_off import OFF, Tally, in_turn, told
from mpisgd.config import CheckpointOptions, FaultOptions, LogOptions
from mpisgd.errors import ConfigError
from mpisgd.launch import environment, mpirun
from mpisgd.records.reader import Run

TOLERANT = ("--with-ft", "ulfm")
LONGER = 6
"""Times the updates of the other benches: what a launch costs is not timed, but long."""


def measure(repetitions: int, every_updates: int) -> list[dict[str, Any]]:
    """Images/s in all ways. Raises ConfigError where a launch fails: the launcher is not Open MPI 5's, say."""
    silent, watched = LogOptions(progress="off", quiet_s=0), LogOptions(progress="off")
    tolerant, checkpoints = FaultOptions(mode="tolerant"), CheckpointOptions(every_updates=every_updates)
    ways: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        OFF: ((), {"log": silent}),
        "checkpoints, watchdog": ((), {"log": watched, "checkpoint": checkpoints}),
        "checkpoints, watchdog, fault-tolerant": (TOLERANT, {"log": watched, "checkpoint": checkpoints, "faults": tolerant}),
    }
    rows = []
    for each in (CASES[0], CASES[2]):
        case = replace(each, updates=LONGER * each.updates)
        tally = Tally(case, list(ways))
        for name in in_turn(list(ways), repetitions):
            with tempfile.TemporaryDirectory() as directory:
                options, special = ways[name]
                tally.add(name, *told(_launched(Path(directory), case, options, special)))
        rows.append(tally.row() | {"every_updates": every_updates})
    return rows


def _launched(directory: Path, case: Case, options: tuple[str, ...], special: dict[str, Any]) -> Run:
    """A run in a launch of its own."""
    config = config_of(directory, case, **special)
    job = directory / "job.toml"
    job.write_text(config_file.dumps(config))
    launcher, *rest = mpirun(1 + LEARNERS)
    command = [launcher, *options, *rest, sys.executable, "-m", "mpisgd", "train", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return Run(Path(config.out))
