"""Arrival times of gradients, and the time to collect k of λ [Chen16 Fig. 3, 4].

Synchronous protocols: from the update that made the weights (clock 0: the start barrier) to arrival on shard 0, dropped gradients
included; in allreduce all arrive with the last. Where chunks left during the backward pass, the pass's end counts (`backward_s`).

Other protocols: a learner's turnaround, from a pull's answer to the next push's arrival on shard 0; first pushes have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run

SYNCHRONOUS = ("hardsync", "backup", "timeout", "allreduce")
PERCENTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True)
class Collected:
    """Seconds until the k-th gradient of a clock value; arrays over k.

    `clocks` counts clock values with k gradients: with dropping, few have all λ.
    """

    k: np.ndarray
    clocks: np.ndarray
    mean: np.ndarray
    median: np.ndarray
    longest: np.ndarray


def synchronous(run: Run) -> bool:
    return about.protocol_name(run) in SYNCHRONOUS


def times(run: Run) -> np.ndarray:
    """Return sorted seconds."""
    return np.sort(np.concatenate(_groups(run) or [np.empty(0)]) if synchronous(run) else _turnarounds(run))


def times_to(run: Run, k: int) -> np.ndarray:
    """Return sorted seconds until each clock value's k-th gradient."""
    return np.sort(np.array([group[k - 1] for group in _groups(run) if len(group) >= k]))


def collected(run: Run) -> Collected:
    groups = _groups(run) if synchronous(run) else []
    most = max((len(group) for group in groups), default=0)
    padded = np.full((len(groups), most), np.nan)
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = group
    return Collected(
        k=np.arange(1, most + 1),
        clocks=np.count_nonzero(~np.isnan(padded), axis=0),
        mean=np.nanmean(padded, axis=0) if most else np.empty(0),
        median=np.nanmedian(padded, axis=0) if most else np.empty(0),
        longest=np.nanmax(padded, axis=0) if most else np.empty(0),
    )


def wanted(run: Run) -> int:
    """Return gradients per synchronous update: λ, or N of backup."""
    return int(run.environment.get("gradients_per_update", run.lambda_))


def arrival_table(run: Run) -> Table:
    arrived = times(run)
    rows: list[tuple[Cell, ...]] = []
    if len(arrived):
        percentiles = (float(value) for value in np.percentile(arrived, PERCENTILES))
        rows.append((len(arrived), float(arrived.mean()), *percentiles, float(arrived[-1])))
    within = " | ".join(f"{'median' if percent == 50 else f'{percent} % within'} [s]" for percent in PERCENTILES)
    columns = columns_of(f"gradients | mean [s] | {within} | longest [s]")
    note = "From the update that made the weights (clock 0: from the start barrier) to the gradient's arrival on shard 0."
    if schema.backward_s(run.pushes).any():
        note += " Chunks left during the backward pass: a gradient counts from the pass's end."
    if not synchronous(run):
        note = "Turnaround: from the answer to a pull to the arrival of the learner's gradient on shard 0; no first pushes."
    return Table("arrivals", "Arrival of gradients [Chen16 Fig. 3]", columns, tuple(rows), note)


def collect_table(run: Run) -> Table:
    found = collected(run)
    rows: list[tuple[Cell, ...]] = list(zip(*(column.tolist() for column in vars(found).values()), strict=True))
    columns = columns_of("k | clock values | mean [s] | median [s] | longest [s]")
    note = "Over the clock values with at least k gradients, dropped gradients included."
    if not synchronous(run):
        note = f"Not defined for {about.protocol_name(run)}: gradients have no common start."
    return Table("collect", f"Time to collect k of λ = {run.lambda_} gradients [Chen16 Fig. 4]", columns, tuple(rows), note)


def _groups(run: Run) -> list[np.ndarray]:
    rows = run.pushes[run.pushes["shard"] == 0]
    updates = run.updates[run.updates["shard"] == 0]
    start = np.full(int(max(rows["timestamp"].max(initial=0), updates["clock"].max(initial=0))) + 1, np.nan)
    start[0] = 0.0
    start[updates["clock"]] = updates["time_s"]
    since = rows["arrival_s"] + schema.backward_s(rows) - start[rows["timestamp"]]
    known = ~np.isnan(since)
    order = np.lexsort((since[known], rows["timestamp"][known]))
    ordered = since[known][order]
    cuts = np.flatnonzero(np.diff(rows["timestamp"][known][order])) + 1
    return [group for group in np.split(ordered, cuts) if len(group)]


def _turnarounds(run: Run) -> np.ndarray:
    rows = run.pushes[run.pushes["shard"] == 0]
    rows = rows[np.lexsort((rows["arrival_s"], rows["learner_id"]))]
    learner_id, arrival_s = rows["learner_id"], rows["arrival_s"] + schema.backward_s(rows)
    turnaround = (arrival_s[1:] - rows["answer_s"][:-1])[learner_id[1:] == learner_id[:-1]]
    return np.asarray(turnaround[~np.isnan(turnaround)])
