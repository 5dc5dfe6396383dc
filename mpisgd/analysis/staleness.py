"""Staleness τ of applied gradients [Zhang16 2.2, 2.4, Fig. 1].

Applied gradients are part of a finished update (`books.applied_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, books
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.records.log.counts import Tally
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict


@dataclass(frozen=True)
class Staleness:
    """τ of T applied gradients.

    `unevenness` is sqrt(T sum z^2) / sum z, z = 1 / max(1, τ): growth of the convergence bound over equally stale gradients of
    equal sum z [Zhang16 Theorem 1, Remark 1]. `beyond` is P(τ > 2n).
    """

    gradients: int
    dropped: int
    minimum: int | None = None
    mean: float | None = None
    median: float | None = None
    maximum: int | None = None
    deviation: float | None = None
    unevenness: float | None = None
    beyond: float | None = None


def overall(run: Run) -> Staleness:
    return of_histogram(histogram(run), int(books.counted_learners(run)[:, :, 2].sum()), about.splitting(run))


def by_shard(run: Run) -> list[Staleness]:
    dropped, n = books.counted_learners(run)[:, :, 2].sum(axis=1).tolist(), about.splitting(run)
    return [of_histogram(tally.staleness, dropped[shard], n) for shard, tally in enumerate(_tallies(run))]


def by_learner(run: Run) -> list[Staleness]:
    applied, n, learners = run.pushes[books.applied_rows(run)], about.splitting(run), books.learners_of(run)
    lost = np.bincount(run.pushes["learner_id"][run.pushes["verdict"] == Verdict.DROP], minlength=learners)
    order = np.argsort(applied["learner_id"], kind="stable")
    parts = np.split(applied["staleness"][order], np.searchsorted(applied["learner_id"][order], np.arange(1, learners)))
    return [of_histogram(np.bincount(tau), int(count), n) for tau, count in zip(parts, lost, strict=True)]


def histogram(run: Run) -> np.ndarray:
    """Count applied gradients of staleness 0, 1, 2 ...: int64."""
    return summed([tally.staleness for tally in _tallies(run)])


def summed(histograms: Sequence[np.ndarray]) -> np.ndarray:
    total = np.zeros(max(map(len, histograms)), np.int64)
    for counts in histograms:
        total[: len(counts)] += counts
    return total


def _tallies(run: Run) -> list[Tally]:
    return [counts.pushes.applied(run.final_clock(shard)) for shard, counts in enumerate(run.counts)]


def of_histogram(counts: np.ndarray, dropped: int, n: int | None = None) -> Staleness:
    """Summarise a histogram, with the population's deviation."""
    total = int(counts.sum())
    if total == 0:
        return Staleness(0, dropped)
    tau, below = np.arange(len(counts)), np.cumsum(counts)
    mean, z = float(tau @ counts / total), 1 / np.maximum(1, tau)
    middle = np.searchsorted(below, [(total - 1) // 2, total // 2], side="right")
    return Staleness(
        gradients=total,
        dropped=dropped,
        minimum=int(np.flatnonzero(counts)[0]),
        mean=mean,
        median=float(middle.mean()),
        maximum=int(np.flatnonzero(counts)[-1]),
        deviation=float(np.sqrt((tau - mean) ** 2 @ counts / total)),
        unevenness=math.sqrt(total * float(z**2 @ counts)) / float(z @ counts),
        beyond=None if n is None else float(counts[2 * n + 1 :].sum() / total),
    )


@dataclass(frozen=True)
class OverClock:
    clock: np.ndarray
    mean: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray


def over_clock(run: Run) -> OverClock:
    """Return staleness by clock, over all shards; skip updates without gradients."""
    rows = run.pushes[books.applied_rows(run)]
    clock, tau = rows["clock"] + 1, rows["staleness"]
    size = int(clock.max(initial=0)) + 1
    counts = np.bincount(clock, minlength=size)
    least, largest = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
    np.minimum.at(least, clock, tau)
    np.maximum.at(largest, clock, tau)
    present = np.flatnonzero(counts)
    mean = np.bincount(clock, weights=tau, minlength=size)[present] / counts[present]
    return OverClock(present, mean, least[present], largest[present])


def shard_table(run: Run) -> Table:
    groups: list[tuple[Cell, Staleness]] = [*enumerate(by_shard(run)), ("all", overall(run))]
    return _table(run, "staleness_shards", "Staleness of applied gradients, by shard", "shard", groups)


def layer_table(run: Run) -> Table:
    """Tabulate staleness by layer, top layer first."""
    slices = run.environment.get("layers", [])
    layers = [(shard, name) for shard, names in enumerate(slices) for name in names]
    found = by_shard(run) if layers else []
    rows: list[tuple[Cell, ...]] = []
    for shard, name in reversed(layers):
        s = found[shard]
        rows.append((name, shard, s.gradients, s.minimum, s.mean, s.median, s.maximum, s.deviation))
    columns = columns_of("layer | shard | gradients | min τ | mean τ :.3f | median τ :g | max τ | deviation :.3f")
    note = "The top layer, next to the loss, comes first. Layers of one shard are pulled and pushed together."
    return Table("staleness_layers", "Staleness by layer [Chen16 Table 1]", columns, tuple(rows), note)


def learner_table(run: Run) -> Table:
    groups: list[tuple[Cell, Staleness]] = [*enumerate(by_learner(run))]
    return _table(run, "staleness_learners", "Staleness of applied gradients, by learner", "learner", groups)


def histogram_table(run: Run) -> Table:
    counts = histogram(run)
    total = int(counts.sum())
    rows = [
        (tau, int(count), 100 * count / total, 100 * running / total)
        for tau, (count, running) in enumerate(zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True))
    ]
    columns = columns_of("τ | gradients | share [%] :.2f | cumulative [%] :.2f")
    return Table("staleness_histogram", "Distribution of staleness [Zhang16 Fig. 1]", columns, tuple(rows))


def _table(run: Run, key: str, title: str, group: str, groups: list[tuple[Cell, Staleness]]) -> Table:
    n = about.splitting(run)
    columns = f"{group} | gradients | dropped | min τ | mean τ :.3f | median τ :g | max τ | deviation :.3f | unevenness :.3f"
    rows: list[list[Cell]] = [
        [name, s.gradients, s.dropped, s.minimum, s.mean, s.median, s.maximum, s.deviation, s.unevenness] for name, s in groups
    ]
    note = "Unevenness: √(T Σz²) / Σz, z = 1/max(1, τ), T gradients; 1 where all are equally stale [Zhang16 Remark 1]."
    if n is not None:
        columns += " | P(τ > 2n) [%] :.4g"
        rows = [[*row, None if s.beyond is None else 100 * s.beyond] for row, (_, s) in zip(rows, groups, strict=True)]
        note += f" n = {n}: [Zhang16 2.4] finds a mean staleness near n, and τ > 2n hardly ever."
    return Table(key, title, columns_of(columns), tuple(tuple(row) for row in rows), note)
