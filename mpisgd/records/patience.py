"""Early stopping, by rows of `evaluations` alone: the evaluator asks during the run, replay asks the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from mpisgd.config import EvaluationOptions
from mpisgd.records.best import best_row, is_better


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

    def note(self, rows: Iterable[Mapping[str, Any]]) -> bool:
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

    def note_all(self, rows: Iterable[Mapping[str, Any]]) -> Patience:
        for _, each in groupby(rows, key=lambda row: int(row["snapshot"])):
            self.note(each)
        return self
