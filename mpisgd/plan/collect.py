"""Seconds per update for every N of N + b = λ [Chen16 3.1, Fig. 4].

Measured by virtual runs of backup (hardsync for b = 0), interpolated among many learners: a log's order statistics miss repeated
lateness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import arrivals
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import Config, replace
from mpisgd.plan.costs.predict import predict
from mpisgd.protocols import BackupOptions, HardsyncOptions
from mpisgd.records.log.reader import Run

#: Most learners for which every N is simulated.
_EVERY = 12


@dataclass(frozen=True)
class Collecting:
    """Seconds per update over N = 1 ... λ: float64, (λ,). `simulated`: bool, (λ,), else interpolated."""

    wanted: np.ndarray
    mean: np.ndarray
    median: np.ndarray
    most: np.ndarray
    simulated: np.ndarray

    def seconds_per_update(self, wanted: int) -> float:
        return float(self.mean[wanted - 1])


def collecting(config: Config, pushes: int) -> Collecting:
    """Predict by a virtual run per `chosen` b; `most` is the 90 % quantile."""
    lambda_ = config.virtual.learners
    points = np.array(sorted(lambda_ - b for b in chosen(lambda_)))
    found = np.array([_at(config, int(wanted), pushes) for wanted in points])
    wanted = np.arange(1, lambda_ + 1)
    mean, median, most = (np.interp(wanted, points, column) for column in found.T)
    return Collecting(wanted, mean, median, most, np.isin(wanted, points))


def chosen(lambda_: int) -> list[int]:
    """Return all b among few learners, else denser at small b."""
    if lambda_ <= _EVERY:
        return list(range(lambda_))
    steps = {0, 1, 2, 3, 4, lambda_ - 1}
    b = 6
    while b < lambda_ - 1:
        steps |= {b, min(b * 4 // 3, lambda_ - 1)}
        b *= 2
    return sorted(steps)


def _at(config: Config, wanted: int, pushes: int) -> tuple[float, float, float]:
    """Return mean, median and 90 % quantile."""
    b = config.virtual.learners - wanted
    found = predict(replace(config, protocol=BackupOptions(b=b) if b else HardsyncOptions()), pushes)
    return found.seconds_per_update, float(np.median(found.intervals)), float(np.quantile(found.intervals, 0.9))


def table(run: Run, found: Collecting) -> Table:
    seen = arrivals.collected(run) if arrivals.synchronous(run) else None
    rows: list[tuple[Cell, ...]] = []
    for at, wanted in enumerate(found.wanted.tolist()):
        logged: tuple[Cell, ...] = (None, None, None)
        if seen is not None and at < len(seen.k):
            logged = (float(seen.mean[at]), float(seen.median[at]), int(seen.clocks[at]))
        predicted = (float(found.mean[at]), float(found.median[at]), float(found.most[at]))
        how = "simulated" if found.simulated[at] else "interpolated"
        rows.append((wanted, len(found.wanted) - wanted, *predicted, how, *logged))
    columns = columns_of(
        "N | b | predicted mean [s] | median [s] | 90 % within [s] | how | log: mean to N-th [s] | log: median to N-th [s]"
        " | clock values"
    )
    note = (
        "The log's: from an update to the arrival of the N-th gradient of the new weights, dropped gradients included [Chen16 3.1]."
    )
    if seen is None:
        note = "The log's protocol has no common start of gradients: the log holds no order statistics."
    return Table("updates", f"Seconds per update, N of λ = {run.lambda_} gradients [Chen16 Fig. 4]", columns, tuple(rows), note)
