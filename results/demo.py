"""The claim of [Zhang16] in small, on real ranks: `mpisgd demo`, kept.

8 learners, 1 shard, mu = 4, alpha0 = 0.03, momentum 0.9, 8 epochs of the 1,437 training digits (8x8 pixels), a small CNN of 9,930
parameters, one seed. Nine ranks on two cores: learners queue for a core, and the mean staleness stays below lambda - 1 = 7.

`python results/demo.py`: two minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import main, panels

from mpisgd.analysis import staleness, training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.records.log.reader import Run
from mpisgd.report import style

RUNS = {
    "hardsync": "hardsync",
    "softsync-plain": "softsync n = λ, α₀ for every gradient",
    "softsync-modulated": "softsync n = λ, α₀/τ",
}


def kept(run: Run) -> dict[str, Any]:
    """Epochs and test errors of the snapshots; how many gradients had tau = 0, 1, 2 ..."""
    curve = training.on_test_data(run)
    if curve is None:
        raise SystemExit("nothing was evaluated")
    return {"epochs": curve.epochs, "error": curve.error, "staleness": staleness.histogram(run)}


def compute() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "mpisgd", "demo", "--out", folder], check=True)
        return {name: kept(Run(Path(folder) / name)) for name in RUNS}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    figure, (left, right) = panels("", [("Test error", "test error [%]"), ("Staleness", "share of applied gradients [%]")])
    rows: list[tuple[Cell, ...]] = []
    for at, (name, label) in enumerate(RUNS.items()):
        own, look = numbers[name], style.line(at)
        error, histogram = 100 * np.array(own["error"]), np.array(own["staleness"])
        left.plot(own["epochs"], error, label=label, **look)
        if name != "hardsync":
            share = 100 * histogram / histogram.sum()
            right.stairs(share, np.arange(len(share) + 1) - 0.5, color=look["color"], linewidth=1.5, label=label)
        found = staleness.of_histogram(histogram, 0)
        rows.append((label, float(error[-1]), found.mean, found.maximum))
    left.set(xlabel="epochs", ylim=(0, 100))
    right.set(xlabel="staleness τ [updates]", ylim=(0, None))
    left.legend(fontsize=8, frameon=False)
    columns = (Column("run"), Column("test error", "%", ".1f"), Column("mean τ", spec=".1f"), Column("max τ"))
    return [Table("demo", "8 learners on real ranks, digits, 8 epochs", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("demo", __doc__, compute, draw)
