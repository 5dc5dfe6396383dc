"""Best evaluation of a run, by rows of `evaluations` alone: the best weights are kept, and patience may end.

The evaluating rank does both: training never waits (law 7). The file of weights is always the whole result of an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from mpisgd.config import EvaluationOptions
from mpisgd.records import weights
from mpisgd.records.weights import EVALUATION, THETA, THETABAR, WEIGHTS, State

Row = Mapping[str, Any]


def is_better(options: EvaluationOptions, value: float, than: float, by: float = 0.0) -> bool:
    """Return whether a value of `options.best` is better by more than `by`; NaN is worst."""
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value - than > by if options.higher else than - value > by


def best_row(options: EvaluationOptions, rows: Iterable[Row]) -> Row | None:
    """Return the best row, the first of equals; None without a value."""
    best: Row | None = None
    part, name = options.judged
    for row in rows:
        if row["train"] == part and is_better(options, row[name], math.nan if best is None else best[name]):
            best = row
    return best


class Best:
    """Keeper of the best weights: `weights` in the file is a state dict, `evaluation` its row of `evaluations`, with `by` and
    `value`.

    Raises CheckpointError for an unreadable file: it may be better.
    """

    def __init__(self, options: EvaluationOptions, path: Path) -> None:
        self._options = options
        self._path = path
        self._value = math.nan
        if path.is_file():
            self._value = float(weights.read_best(path)[EVALUATION]["value"])

    def offer(self, rows: Iterable[Row], states: Mapping[str, State], last: bool = False) -> None:
        """Keep the weights of the best row, if better than all before. Raises StorageError."""
        options = self._options
        row, name = best_row(options, rows), options.judged[1]
        if row is None or not is_better(options, row[name], self._value):
            return
        value = float(row[name])
        told = {"by": options.best, "value": value, **{name: _plain(each) for name, each in row.items()}}
        state = states[THETABAR if row["averaged"] else THETA]
        weights.write(self._path, {WEIGHTS: state, EVALUATION: told})
        self._value = value


def _plain(value: Any) -> int | float:
    """Return a plain number, for torch's `weights_only` reader."""
    return float(value) if isinstance(value, float) else int(value)


class Patience:
    """Count of evaluations in a row not better than the best by more than `min_delta`.

    A snapshot is one evaluation: the better of weights and average, on test or set-aside data.

    Attributes:
        over_at: snapshot at which patience ended; -1 = not yet.
    """

    def __init__(self, options: EvaluationOptions) -> None:
        self._options = options
        self._best = math.nan
        self._waited = 0
        self.over_at = -1

    def note(self, rows: Iterable[Row]) -> bool:
        """Note the rows of one snapshot; return whether patience ends here."""
        options = self._options
        rows = list(rows)
        row = best_row(options, rows)
        value = math.nan if row is None else float(row[options.judged[1]])
        if is_better(options, value, self._best, options.min_delta):
            self._best, self._waited = value, 0
            return False
        self._waited += 1
        if self._waited < options.patience or self.over_at >= 0:
            return False
        self.over_at = int(rows[0]["snapshot"])
        return True

    def note_all(self, rows: Iterable[Row]) -> Patience:
        for _, each in groupby(rows, key=lambda row: int(row["snapshot"])):
            self.note(each)
        return self
