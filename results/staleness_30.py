"""Staleness of n-softsync at lambda = 30 on 31 real ranks [Zhang16 Fig. 1].

Learners sleep for most of a mini-batch (normal, 150 ± 15 ms), so that two cores can stand for thirty; softmax regression
on digits, mu = 1, where the paper shows a whole training. The first 2 lambda gradients are left out: they come from clock 0.

`python results/staleness_30.py`: three minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from virtual_runs import main, panels

from mpisgd.analysis.staleness import of_histogram
from mpisgd.analysis.tables import Column, Table
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config.config_file import dumps, from_mapping
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

LAMBDA = 30
GRADIENTS = {1: 1800, 15: 3000, 30: 3000}
JOB = {
    "model": "softmax",
    "mu": 1,
    "alpha0": 0.001,
    "straggler": {"delay": "normal", "delay_mean_s": 0.15, "delay_spread": 0.1},
    "evaluation": {"every_epochs": 0.0},
    "log": {"progress": "off"},
}


def measured(n: int, folder: Path) -> list[int]:
    """How many of the applied gradients had tau = 0, 1, 2 ..."""
    job = {**JOB, "protocol": {"name": "softsync", "n": n}, "epochs": GRADIENTS[n] / 1437, "out": str(folder / str(n))}
    path = folder / f"{n}.toml"
    path.write_text(dumps(from_mapping(job)), encoding="utf-8")
    command = [*mpirun(LAMBDA + 1), sys.executable, "-m", "mpisgd", "train", str(path)]
    subprocess.run(command, env=environment(), check=True)
    rows = Run(folder / str(n)).pushes
    return list(np.bincount(rows["staleness"][rows["verdict"] == Verdict.APPLY][2 * LAMBDA :]).tolist())


def compute() -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        return {str(n): measured(n, Path(folder)) for n in GRADIENTS}


def draw(numbers: dict[str, list[int]]) -> tuple[list[Table], Figure]:
    y = "share of applied gradients [%]"
    figure, beside = panels("staleness τ [updates]", [(f"n = {n}, 31 real ranks", y) for n in numbers])
    rows = []
    for (key, counts), axes in zip(numbers.items(), beside, strict=True):
        n, histogram = int(key), np.array(counts)
        found = of_histogram(histogram, 0, n)
        axes.bar(np.arange(len(histogram)), 100 * histogram / histogram.sum(), width=0.85, color=style.COLOURS[0])
        axes.axvline(2 * n + 0.5, color=style.GREY, linestyle=":", label="2n")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        rows.append((n, found.gradients, found.mean, found.deviation, found.maximum, found.beyond))
    beside[0].legend(fontsize=8.5, frameon=False)
    columns = (
        Column("n"),
        Column("gradients"),
        Column("mean τ", spec=".2f"),
        Column("deviation", spec=".2f"),
        Column("max τ"),
        Column("P(τ > 2n)", spec=".1g"),
    )
    return [Table("staleness_30", "Staleness, λ = 30, 31 real ranks", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("staleness-30", __doc__, compute, draw)
