"""Runs that differ in the seed alone, as one: mean and range."""

from __future__ import annotations

import json
import os.path
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpisgd.analysis import about
from mpisgd.analysis.arrivals import Collected
from mpisgd.analysis.tables import Cell, Column
from mpisgd.analysis.training import Curve
from mpisgd.records.log.reader import Run

_OF_ONE_RUN = ("environment", "out", "overwrite", "seed", "log", "loggers", "callbacks")
"""Entries of config.toml without effect on the computation, and the seed."""


def grouped(runs: Sequence[Run]) -> list[list[int]]:
    """Group places of runs that differ in the seed alone."""
    groups: list[tuple[str, list[int]]] = []
    for at, run in enumerate(runs):
        same = _same(run)
        for known, places in groups:
            if known == same and run.config.get("seed") not in [runs[each].config.get("seed") for each in places]:
                places.append(at)
                break
        else:
            groups.append((same, [at]))
    return [places for _, places in groups]


def _same(run: Run) -> str:
    state = about.status(run)
    chosen = {key: value for key, value in run.config.items() if key not in _OF_ONE_RUN}
    sizes = [run.lambda_, run.shards, state.done, state.diverged, run.environment.get("brought")]
    return json.dumps([chosen, sizes], sort_keys=True, default=str)


def name(names: Sequence[str]) -> str:
    """Return e.g. `soft-*` for `soft-1` and `soft-2`."""
    same = os.path.commonprefix(list(names))  # noqa: RUF071 - of letters, not of folders
    return names[0] if len(names) == 1 else f"{same}*"


def row(rows: Sequence[tuple[Cell, ...]], columns: Sequence[Column]) -> tuple[Cell, ...]:
    """Merge cells that differ into their mean, with the range in parentheses."""
    return tuple(_cell(cells, column) for cells, column in zip(zip(*rows, strict=True), columns, strict=True))


def _cell(cells: Sequence[Cell], column: Column) -> Cell:
    numbers = [float(cell) for cell in cells if cell is not None and not isinstance(cell, str)]
    if all(cell == cells[0] for cell in cells):
        return cells[0]
    if not numbers:
        return "; ".join(dict.fromkeys(str(cell) for cell in cells if cell is not None))
    mean, *ends = (format(number, column.spec or ".4g") for number in (np.mean(numbers), min(numbers), max(numbers)))
    return f"{mean} ({'..'.join(ends)})"


def curves(found: Sequence[Sequence[Curve]]) -> list[Curve]:
    """Return means over kinds and snapshots of all runs."""
    if len(found) == 1:
        return list(found[0])
    kinds = {(curve.averaged, curve.part): curve for curve in found[0]}
    each = [[curve for run in found for curve in run if (curve.averaged, curve.part) == kind] for kind in kinds]
    return [_mean(alike) for alike in each if len(alike) == len(found)]


def _mean(alike: Sequence[Curve]) -> Curve:
    count = min(len(curve.epochs) for curve in alike)
    fields = ("epochs", "seconds", "loss", "error", "updates")
    cut = [replace(curve, **{field: getattr(curve, field)[:count] for field in fields}) for curve in alike]
    means = {field: np.mean([getattr(curve, field) for curve in cut], axis=0) for field in fields}
    return replace(cut[0], **means, metrics={}, seeds=tuple(cut))


def collected(found: Sequence[Collected]) -> Collected:
    if len(found) == 1:
        return found[0]
    count = min(len(one.k) for one in found)
    means = {field: np.mean([getattr(one, field)[:count] for one in found], axis=0) for field in ("mean", "median")}
    return replace(found[0], k=found[0].k[:count], **means)
