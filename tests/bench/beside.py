"""`python -m tests.bench beside --checkout DIRECTORY`: cycles and images/s of this checkout over those of another one, in turn.

The other one is the project at another commit, which this Python can run: `git worktree add --detach DIRECTORY COMMIT`. Each runs
its own `bench wire` and `bench train`; a ratio is that of two launches beside each other, and over 1 this checkout is faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts.cases import LEARNERS
from mpisgd.bench.parts.measured import in_turn, over, show
from mpisgd.comm.mpi.launch import environment, mpirun

HERE = Path(__file__).resolve().parents[2]
WIRE = ("wire", "--sizes", "350000", "44000000", "--optimizers", "sgd")
"""With as many learners and shards as there are ranks for; so four are started."""
TRAIN = ("train", "--cases", "cnn-16", "mlp-16", "--ways", "hardsync", "allreduce", "softsync", "--repetitions", "1")
_RANKS = {WIRE: 4, TRAIN: LEARNERS + 1}


def measure(repetitions: int, checkout: str) -> list[dict[str, Any]]:
    """A row for each layout of `bench wire`, and each way of each case of `bench train`.

    Raises ConfigError: a directory that is no checkout; a bench that fails there, or here.
    """
    there = Path(checkout).resolve()
    require(bool(checkout) and (there / "mpisgd" / "__main__.py").is_file(), "checkout", checkout, "a checkout of mpisgd")
    checkouts = {"here": HERE, "there": there}
    found: dict[str, dict[str, list[float]]] = {}
    for bench in (WIRE, TRAIN):
        for name in in_turn(list(checkouts), repetitions):
            for what, speed in _speeds(checkouts[name], bench):
                found.setdefault(what, {each: [] for each in checkouts})[name].append(speed)
    return [
        {"what": what, "here_over_there": over(speeds["here"], speeds["there"]), "launches": repetitions}
        for what, speeds in found.items()
        if len(speeds["here"]) == len(speeds["there"])  # both have it
    ]


def _speeds(directory: Path, bench: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Cycles, or images, per second of one launch."""
    with tempfile.TemporaryDirectory() as out:
        command = [*mpirun(_RANKS[tuple(bench)]), sys.executable, "-m", "mpisgd", "bench", *bench, "--out", out]
        env = environment() | {"PYTHONPATH": str(directory)}
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"{directory}: {' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        rows = json.loads(Path(out, f"{bench[0]}.json").read_text())["rows"]
    for row in rows:
        if bench[0] == "wire":
            yield f"{row['nbytes']:,} bytes, {row['learners']} learners, {row['shards']} shards", 1 / row["cycle_s"]["median"]
        else:
            yield from ((f"{row['case']}, {way}", rate["median"]) for way, rate in row["images_per_s"].items())


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [f"{row['what']:<60} {show(row['here_over_there'])}" for row in rows]
