"""Peaks of resident memory of all ranks of a job: with torch alone, with MPI, and at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import environment, mpirun
from tests import travel

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "peaks "

#: Each rank prints its peak of resident memory, in KiB: with torch and MPI alone, and at the end of the job.
PROGRAM = """
import json, sys
import torch

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

begun = peak()
import mpisgd
from mpisgd.comm.mpi.library import MPI

with_mpi = peak()
mpisgd.train(config=json.loads(sys.argv[1]))
print("peaks " + json.dumps({"rank": MPI.COMM_WORLD.rank, "torch": begun, "mpi": with_mpi, "end": peak()}), flush=True)
"""


def command_of(directory: Path, ranks: int, config: Mapping[str, Any]) -> list[str]:
    """What starts the job; its program is written into `directory`."""
    script = directory / "program.py"
    script.write_text(PROGRAM)
    return [*mpirun(ranks), sys.executable, str(script), json.dumps(config)]


def variables() -> dict[str, str]:
    """The environment of such a job, whose models may be those of the benches."""
    return {**environment(), "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}


def told(lines: Iterable[str], ranks: int, status: int) -> list[dict[str, int]]:
    """Each rank's peaks in KiB, in the order of the ranks. Raises ConfigError where the job failed."""
    said = list(lines)
    found = [json.loads(line.removeprefix(_MARK)) for line in said if line.startswith(_MARK)]
    if status != 0 or len(found) != ranks:
        raise ConfigError(f"exit status {status}\n" + "\n".join(line.rstrip() for line in said))
    return sorted(found, key=lambda each: each["rank"])


def of_job(directory: Path, ranks: int, config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Run a job to its end, and return its peaks as `told`. Raises ConfigError where it fails."""
    options, travels = travel.launched(config)
    command, env = command_of(directory, ranks, options), variables() | travels
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    return told(done.stdout.splitlines(), ranks, done.returncode)
