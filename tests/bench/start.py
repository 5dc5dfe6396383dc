"""`python -m tests.bench start`: seconds from mpirun to a run's first update, beside those of launches that do less.

Imports dominate: every rank reads and runs them, and thousands of ranks do so at once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config import Config, EvaluationOptions, LogOptions, SoftmaxOptions, config_file

#: What a launch does before it ends; each does what the one before does, and more.
LESS = {
    "python": "pass",
    "mpi": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
    "torch": "import torch, h5py; from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
}


def measure(repetitions: int, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each number of ranks. Raises ConfigError where a launch fails."""
    for count in ranks:
        seconds: dict[str, list[float]] = {name: [] for name in (*LESS, "first_update")}
        for _ in range(repetitions):
            for name, program in LESS.items():
                seconds[name].append(_until([*mpirun(count), sys.executable, "-c", program], ""))
            with tempfile.TemporaryDirectory() as directory:
                seconds["first_update"].append(_until(_training(Path(directory), count), "epoch "))
        yield {
            "ranks": count,
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "first_update_over_torch": over(seconds["first_update"], seconds["torch"]),
        }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    names = (*LESS, "first_update")
    lines = [f"{'ranks':>5} {'python':>8} {'+ MPI':>8} {'+ torch':>8} {'first update':>13}   over + torch"]
    for row in rows:
        seconds = [f"{row['seconds'][name]['median']:{13 if name == 'first_update' else 8}.2f}" for name in names]
        lines.append(f"{row['ranks']:5} {' '.join(seconds)}   {show(row['first_update_over_torch'])}")
    return lines


def _training(directory: Path, ranks: int) -> list[str]:
    """A small run that tells of each update."""
    config = Config(
        model=SoftmaxOptions(),
        epochs=0.02 * ranks,
        evaluation=EvaluationOptions(every_epochs=0),
        log=LogOptions(progress="plain", progress_s=0.0),
        threads=1,
        out=str(directory / "run"),
    )
    job = directory / "job.toml"
    job.write_text(config_file.dumps(config))
    return [*mpirun(ranks), sys.executable, "-m", "mpisgd", "train", str(job)]


def _until(command: list[str], text: str) -> float:
    """Seconds until the launch prints a line with this text; "" = until it has ended."""
    begun_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()) as process:
        assert process.stdout is not None
        seen_s, said = 0.0, []
        for line in process.stdout:
            said.append(line)
            if text and text in line and not seen_s:
                seen_s = time.perf_counter() - begun_s
        status = process.wait()
        ended_s = time.perf_counter() - begun_s
    if status != 0 or (text and not seen_s):
        raise ConfigError(f"{' '.join(command)}: exit status {status}\n{''.join(said)}")
    return seen_s or ended_s
