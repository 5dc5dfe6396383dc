"""How many backup learners: updates and time to converge, over N of N + b [Chen16 Fig. 5, 6], on the virtual cluster.

The paper: fewer gradients per update need more updates (Fig. 5); more gradients take longer to collect (Fig. 4); the product has
its minimum at N = 96, b = 4 of 100 learners (Fig. 6), where iterations between measured N are interpolated linearly.

Same: iterations(N) measured at some N and interpolated linearly; learning rate proportional to N; time(N) = iterations(N) x mean
time to collect N of N + b gradients, for N + b = 100, and 50. Beyond the paper: the same with the mean time per update of the
backup protocol itself, run on the virtual cluster for each N, where a straggler that is still at its old mini-batch is missing
at the next updates as well.
Not the same: a small model (MLP of 32 units on 1,437 digits, one sample per gradient, alpha0 = 0.002 N, momentum 0.9) to a
training loss of 0.1 in place of Inception to its final accuracy: iterations are of this model, not of the paper's. They are of
hardsync, which equals serial SGD (DESIGN 4, law 5), so that 5 learners with N/5 samples stand for N learners with one; mean of two
seeds. Assumed: stragglers as in chen16_fig3_4.py; seconds are of those, not of the digits.

The curve is flat near its minimum, and the tail that decides about the last learners is made of rare events: the best b is
known to a few learners only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chen16_fig3_4 import job as straggling
from matplotlib.figure import Figure
from virtual_runs import logged, main, panels, timed

from mpisgd.analysis import arrivals
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.report import style

MEASURED = (30, 40, 50, 60, 70, 80, 90, 100)
"""N at which iterations are measured."""
TARGET = 0.1
"""Training loss at which a run has converged."""
SEEDS = (1, 2)
CLOCKS = 200
NS = {
    100: (60, 70, 75, 80, 84, 88, 90, 92, 94, 95, 96, 97, 98, 99, 100),
    50: (30, 34, 38, 40, 42, 44, 45, 46, 47, 48, 49, 50),
}


def iterations(wanted: int, seed: int = 1, target: float = TARGET, epochs: float = 5) -> float:
    """Updates of `wanted` gradients until the training loss is at the target, interpolated between quarters of an epoch."""
    run = logged(
        {
            "protocol": {"name": "hardsync"},
            "model": {"name": "mlp", "hidden": [32]},
            "optimizer": {"name": "sgd", "momentum": 0.9},
            "mu": wanted // 5,
            "alpha0": 0.002 * wanted,
            "seed": seed,
            "epochs": epochs,
            "threads": 1,
            "evaluation": {"every_epochs": 0.25, "train": True},
            "virtual": {"learners": 5, "batched": True},
        }
    )
    rows = np.sort(run.evaluations[run.evaluations["train"] == 1], order="snapshot")
    there = int(np.flatnonzero(rows["loss"] <= target)[0])
    return float(np.interp(-target, -rows["loss"][there - 1 : there + 1], rows["clock_min"][there - 1 : there + 1]))


def collecting_s(lambda_: int, ns: Sequence[int], clocks: int = CLOCKS) -> np.ndarray:
    """Mean seconds to collect N gradients while all learners start together, as in Fig. 4: float64, shape (ns,)."""
    return np.asarray(arrivals.collected(logged(straggling(lambda_, clocks))).mean[np.array(ns) - 1])


def updating_s(lambda_: int, ns: Sequence[int], clocks: int = CLOCKS) -> np.ndarray:
    """Mean seconds per update of the backup protocol with b = lambda - N: float64, shape (ns,)."""
    seconds = []
    for wanted in ns:
        job = dict(straggling(lambda_, clocks))
        outcome = timed({**job, "protocol": {"name": "backup", "N": wanted}, "epochs": wanted / lambda_})
        seconds.append(outcome.training_s / outcome.clocks[0])
    return np.array(seconds)


def best(ns: Sequence[int], seconds: np.ndarray) -> int:
    """The N with the least time to converge."""
    return ns[int(np.argmin(seconds))]


def compute() -> dict[str, Any]:
    """Updates of each measured N and seed; of each N + b the seconds to collect N, and those of the protocol, over NS."""
    found = [[iterations(wanted, seed) for seed in SEEDS] for wanted in MEASURED]
    return {"updates": found, **{str(all_): [collecting_s(all_, ns), updating_s(all_, ns)] for all_, ns in NS.items()}}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    updates = np.array(numbers["updates"])
    count = updates.mean(axis=1)
    titles = [("Updates to converge [Chen16 Fig. 5]", f"updates to a training loss of {TARGET}")]
    titles += [(f"Time to converge, N + b = {lambda_} [Chen16 Fig. 6]", "estimated time [s]") for lambda_ in NS]
    figure, (first, *others) = panels("gradients per update, N", titles)
    first.plot(MEASURED, count, label="mean of two seeds", **style.line(0))
    first.plot(MEASURED, updates, ".", color="black", markersize=4)
    first.legend(fontsize=8.5, frameon=False)
    first.set_ylim(bottom=0)
    measured = tuple(Column(f"N = {n}", spec=".0f") for n in MEASURED)
    tables = [Table("fig5", f"Updates to a training loss of {TARGET}", measured, (tuple(count),))]
    for (lambda_, ns), axes in zip(NS.items(), others, strict=True):
        between = np.interp(ns, MEASURED, count)
        seconds = np.array(numbers[str(lambda_)])
        names = ("mean time to collect N", "backup protocol itself")
        for at, (name, each) in enumerate(zip(names, seconds, strict=True)):
            axes.plot(ns, between * each, label=f"{name}: best N = {best(ns, between * each)}", **style.line(at))
        highest = 3 * min(float((between * each).min()) for each in seconds)
        axes.set_ylim(0, highest)
        beyond = [(int(n), float(max(k * each for each in both))) for n, k, *both in zip(ns, between, *seconds, strict=True)]
        for n, most in beyond:
            if most > highest:
                axes.annotate(f"{most:.0f} s ↑", (n, 0.985 * highest), ha="right", va="top", fontsize=8.5)
        axes.legend(fontsize=8.5, frameon=False)
        columns = (
            Column("N"),
            Column("b"),
            Column("updates", spec=".1f"),
            Column("collect N", "s", ".2f"),
            Column("time to converge", "s", ".0f"),
            Column("per update, backup", "s", ".2f"),
            Column("time to converge, backup", "s", ".0f"),
        )
        rows: list[tuple[Cell, ...]] = [
            (n, lambda_ - n, float(k), float(c), float(k * c), float(u), float(k * u))
            for n, k, c, u in zip(ns, between, *seconds, strict=True)
        ]
        tables.append(Table(f"fig6_{lambda_}", f"N + b = {lambda_}", columns, tuple(rows)))
    return tables, figure


if __name__ == "__main__":
    main("chen16-fig5-6", __doc__, compute, draw)
