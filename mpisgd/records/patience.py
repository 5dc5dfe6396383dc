"""Early stopping: when evaluations have been no better for so long that training is to end.

A rule of rows of `evaluations` alone: the evaluator asks it while the run goes on, and replay asks it of the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from mpisgd.config import EvaluationOptions
from mpisgd.records.best import best_row, is_better


class Patience:
    """Counts evaluations in a row that were not better than the best before them by more than `min_delta`.

    One snapshot is one evaluation: the best of what its weights and their average come to on test data, or on samples set aside.

    Attributes:
        over_at: the snapshot at which `patience` evaluations had been no better; -1 = not yet.
    """

    def __init__(self, options: EvaluationOptions) -> None:
        self._options = options
        self._best = math.nan
        self._waited = 0
        self.over_at = -1

    def note(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Note the rows of one snapshot; whether its evaluation was the one too many."""
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
        """Note the rows of snapshots, one after the other."""
        for _, each in groupby(rows, key=lambda row: int(row["snapshot"])):
            self.note(each)
        return self
