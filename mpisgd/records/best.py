"""The best weights of a run by an evaluation, kept while it trains: by whoever evaluates, for whom nobody waits (law 7).

One file, made aside, synced and renamed: so it is always that of some evaluation, whole. Where a run goes on after an interruption,
what was best before is still there to be bettered, also where it came after the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpisgd.base import durable
from mpisgd.base.storage import writing
from mpisgd.config import EvaluationOptions
from mpisgd.records import weights
from mpisgd.records.weights import EVALUATION, THETA, THETABAR, WEIGHTS, State

Row = Mapping[str, Any]
"""A row of `evaluations`."""


def is_better(options: EvaluationOptions, value: float, than: float, by: float = 0.0) -> bool:
    """Whether a value of `options.best` is better by more than `by`; anything is better than NaN, and NaN never is."""
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value - than > by if options.higher else than - value > by


def best_row(options: EvaluationOptions, rows: Iterable[Row]) -> Row | None:
    """The best of these rows, the first of equals; None where none has a value."""
    best: Row | None = None
    part, name = options.judged
    for row in rows:
        if row["train"] == part and is_better(options, row[name], math.nan if best is None else best[name]):
            best = row
    return best


class Best:
    """Keeps the weights of the best evaluation so far.

    Args:
        path: the file: `weights` is a state dict, `evaluation` the row of `evaluations` that it came to, and by what it is best.

    Raises CheckpointError where a file is there that cannot be read: it may be better than what comes.
    """

    def __init__(self, options: EvaluationOptions, path: Path) -> None:
        self._options = options
        self._path = path
        self._value = math.nan
        if path.is_file():
            self._value = float(weights.read_best(path)[EVALUATION]["value"])

    def offer(self, rows: Iterable[Row], states: Mapping[str, State], last: bool = False) -> None:
        """Keep the weights of the best of these rows, if it is better than all before. Raises StorageError.

        `states`: those that were evaluated, `theta` and perhaps `thetabar`.
        """
        options = self._options
        row, name = best_row(options, rows), options.judged[1]
        if row is None or not is_better(options, row[name], self._value):
            return
        value = float(row[name])
        told = {"by": options.best, "value": value, **{name: _plain(each) for name, each in row.items()}}
        state = states[THETABAR if row["averaged"] else THETA]
        with writing(self._path):
            with durable.made_aside(self._path) as aside:
                torch.save({WEIGHTS: state, EVALUATION: told}, aside)
            durable.sync_directory(self._path.parent)
        self._value = value


def _plain(value: Any) -> int | float:
    """A number that a file of torch's may hold, which is read without executing anything."""
    return float(value) if isinstance(value, float) else int(value)
