"""Distribution of staleness at lambda = 30 under n-softsync, n = 1, 15, 30 [Zhang16 2.4, Fig. 1], on the virtual cluster.

The paper: tau in {0, 1, 2} for n = 1; a mean near n for n = 15 and 30; P(tau > 2n) < 0.0001.

Same: lambda, n, c = floor(lambda/n), the protocol, the CIFAR-10 network's 350 kB, mu = 4, one clock per shard, blocking sends.
Not the same: virtual ranks, one shard, more than 100,000 gradients in place of a whole training; no gradient is computed, since
staleness does not depend on it. Assumed: 3.2 ms of compute per sample, so that a mini-batch takes 13 ms, and its spread.

The spread is what the claim rests on. The paper says that its learners are alike and run at similar speeds, no more. Here
mini-batches are normal with a deviation of 20 %, the same as in zhang16_fig2.py, where hardsync pays for them; a second table
shows how far the spread may go. The mean does not depend on it: in the time of its own cycle every learner sees lambda - 1
pushes of others, whoever is fast, hence (lambda - 1)/c updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from virtual_runs import Job, logged, main, panels

from mpisgd.analysis import staleness
from mpisgd.analysis.staleness import Staleness
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.report import style

LAMBDA = 30
NS = (1, 15, 30)
MU = 4
PARAMETERS = 89_578
SAMPLE_S = 3.2e-3
MEAN_S = MU * SAMPLE_S

Compute = dict[str, Any]


def normal(share: float) -> Compute:
    return {"name": "normal", "mean_s": MEAN_S, "deviation_s": share * MEAN_S}


def lognormal(sigma: float) -> Compute:
    return {"name": "lognormal", "mean_s": MEAN_S, "sigma": sigma}


SPREAD = normal(0.2)
OTHERS = {
    "normal, 10 %": normal(0.1),
    "normal, 30 %": normal(0.3),
    "log-normal, σ = 0.3": lognormal(0.3),
    "log-normal, σ = 0.5": lognormal(0.5),
}


def job(n: int, compute: Compute, gradients: int) -> Job:
    return {
        "protocol": {"name": "softsync", "n": n},
        "mu": MU,
        "epochs": 1,
        "virtual": {"learners": LAMBDA, "gradients": False, "parameters": PARAMETERS, "train_samples": gradients * MU},
        "compute": compute,
    }


def measured(n: int, compute: Compute, gradients: int) -> np.ndarray:
    """How many of the applied gradients, from the first on, had tau = 0, 1, 2 ..."""
    return staleness.histogram(logged(job(n, compute, gradients)))


def row(n: int, found: Staleness) -> tuple[Cell, ...]:
    return n, found.gradients, found.mean, found.deviation, found.minimum, found.maximum, found.beyond


COLUMNS = (
    Column("n"),
    Column("gradients"),
    Column("mean τ", spec=".2f"),
    Column("deviation", spec=".2f"),
    Column("min τ"),
    Column("max τ"),
    Column("P(τ > 2n)", spec=".1g"),
)


def compute() -> dict[str, Any]:
    """Histograms of each n."""
    found = [measured(n, SPREAD, 110_000) for n in NS]
    return {"normal, 20 %": found, "others": {name: [measured(n, spread, 20_000) for n in NS] for name, spread in OTHERS.items()}}


def _read(histograms: list[list[int]]) -> dict[int, tuple[Staleness, np.ndarray]]:
    arrays = (np.array(each) for each in histograms)
    return {n: (staleness.of_histogram(each, 0, n), each) for n, each in zip(NS, arrays, strict=True)}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    found = _read(numbers["normal, 20 %"])
    others = {name: _read(each) for name, each in numbers["others"].items()}
    y = "share of applied gradients [%]"
    figure, beside = panels("staleness τ [updates]", [(f"n = {n}: mean {found[n][0].mean:.2f}", y) for n in NS])
    for n, axes in zip(NS, beside, strict=True):
        histogram, wide = found[n][1], others["log-normal, σ = 0.5"][n][1]
        share, wider = 100 * histogram / histogram.sum(), 100 * wide / wide.sum()
        axes.bar(np.arange(len(share)), share, width=0.85, color=style.COLOURS[0], label="normal, 20 %")
        axes.stairs(wider, np.arange(len(wider) + 1) - 0.5, color=style.COLOURS[1], linewidth=1.5, label="log-normal, σ = 0.5")
        axes.axvline(2 * n + 0.5, color=style.GREY, linestyle=":", label="2n")
        axes.set_xlim(-0.6, max(4.6, 2.6 * n))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    beside[0].legend(fontsize=8.5, frameon=False)
    rows = tuple(row(n, one) for n, (one, _) in found.items())
    more = tuple((name, *row(n, one)) for name, runs in others.items() for n, (one, _) in runs.items())
    return [
        Table("zhang16_fig1", "Staleness, λ = 30, mini-batches normal with a deviation of 20 %", COLUMNS, rows),
        Table("spread", "Other spreads", (Column("mini-batches"), *COLUMNS), more),
    ], figure


if __name__ == "__main__":
    main("zhang16-fig1", __doc__, compute, draw)
