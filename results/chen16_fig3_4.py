"""Stragglers: how long it takes to collect k gradients of 100 learners [Chen16 Fig. 3, 4], on the virtual cluster.

The paper, of 100 learners that train Inception: most mean times to collect k gradients are between 1.4 and 1.8 s, and the last
few take much longer; 80 % of the 98th gradients come within 2 s, but only 30 % of the last; the longest took 310 s.

Same: 100 synchronous learners, one update per clock value, times from the update to the arrival of the k-th gradient, read by
`mpisgd.analysis.arrivals` from the run log.
Not the same: virtual ranks; hardsync; no gradient is computed. Assumed: the compute seconds are `heavy_tail` as it stands, whose
options were chosen to have this shape: a narrow log-normal body, and 1.2 % of mini-batches with a delay from a Pareto tail of index
1, cut at 310 s. Network and shard are nearly free: the paper's times include theirs, so the compute seconds do. So the
*shape* is put in; what comes out is that loops, channel and analysis keep it. With an index of 1 the mean time for all 100 hangs
on a few stragglers, and differs by half between seeds; the median does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main, panels

from mpisgd.analysis import arrivals
from mpisgd.analysis.tables import Column, Table
from mpisgd.report import style

LAMBDA = 100
CLOCKS = 400
WITHIN_S = 2.0
KS = (1, 50, 90, 95, 96, 97, 98, 99, 100)


def job(lambda_: int, clocks: int, seed: int = 1) -> Job:
    """Only what a learner computes takes long: few parameters."""
    mu = 32
    return {
        "protocol": {"name": "hardsync"},
        "mu": mu,
        "seed": seed,
        "epochs": 1,
        "virtual": {"learners": lambda_, "gradients": False, "parameters": 1000, "train_samples": clocks * lambda_ * mu},
        "compute": {"name": "heavy_tail"},
    }


def within(times: np.ndarray, seconds: float = WITHIN_S) -> float:
    """Share of the clock values that have their gradients by then."""
    return float(np.mean(times < seconds))


def compute() -> dict[str, Any]:
    """Seconds to collect k gradients: over all k their mean, median and largest; of KS each clock value's, to the millisecond."""
    run = logged(job(LAMBDA, CLOCKS))
    found = arrivals.collected(run)
    times = {str(k): np.sort(arrivals.times_to(run, k)).round(3) for k in KS}
    return {"mean": found.mean, "median": found.median, "longest": found.longest, "times": times}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    mean, median, longest = (np.array(numbers[name]) for name in ("mean", "median", "longest"))
    times_to = {int(k): np.array(times) for k, times in numbers["times"].items()}
    figure, (left, right) = panels(
        "",
        [
            ("Time until k gradients are there [Chen16 Fig. 3]", "cumulative share"),
            ("Time to collect k of 100 gradients [Chen16 Fig. 4]", "time since the update [s]"),
        ],
    )
    for at, k in enumerate((50, 90, 97, 98, 99, 100)):
        times = times_to[k]
        look = {**style.line(at), "markevery": (0.02 * at, 0.2)}
        left.plot(times, np.arange(1, len(times) + 1) / len(times), drawstyle="steps-post", label=f"k = {k}", **look)
    left.set(xlim=(1, 6), ylim=(0, 1.02), xlabel=f"time since the update [s]; longest, not shown: {longest[-1]:.0f} s")
    for at, (name, seconds) in enumerate({"mean": mean, "median": median}.items()):
        right.plot(np.arange(LAMBDA) + 1, seconds, label=name, **{**style.line(at), "markevery": (10 * at, 20)})
    right.set(xlim=(0, LAMBDA + 1), ylim=(0, 1.08 * mean.max()), xlabel="gradients collected, k")
    for axes in (left, right):
        axes.legend(fontsize=8.5, frameon=False)
    rows = tuple((k, *(float(column[k - 1]) for column in (mean, median, longest)), 100 * within(times_to[k])) for k in KS)
    columns = (
        Column("k"),
        Column("mean", "s", ".2f"),
        Column("median", "s", ".2f"),
        Column("longest", "s", ".1f"),
        Column("within 2 s", "%", ".0f"),
    )
    return [Table("chen16_fig3_4", f"Time to collect k of {LAMBDA} gradients, {CLOCKS} updates", columns, rows)], figure


if __name__ == "__main__":
    main("chen16-fig3-4", __doc__, compute, draw)
