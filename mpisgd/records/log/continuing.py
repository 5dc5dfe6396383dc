"""The log as far as it is written when a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import Rows, attempt_of, continued


def evaluated(
    run: Path, attempts: list[int], snapshots: int, rows_each: int, complain: Callable[[str], None] = lambda why: None
) -> tuple[int, list[list[int]]]:
    """Find what the evaluator of a run that is continued need not do again.

    No checkpoint waits for the evaluator: after a loss of power its log may be torn. Then that of the attempt before counts, and
    the rest is evaluated again.

    Args:
        attempts: those that the run continues, in their order.
        snapshots: how many had been taken at the checkpoint.
        rows_each: of one snapshot.
        complain: is told of a log that is passed over.

    Returns the first snapshot to evaluate, and which rows come before (`schema`, `continues`).
    """
    parts: list[tuple[int, np.ndarray]] = []
    for attempt in reversed(attempts):
        path = run / schema.evaluator_file(attempt)
        if path.is_file():
            try:
                parts = [(attempt_of(each.path), each.rows("evaluations")) for each in continued(path)]
                break
            except DataError as error:
                complain(f"{error}; what was evaluated then is evaluated again")
    done = sum(int(np.count_nonzero(rows["snapshot"] < snapshots)) for _, rows in parts) // rows_each
    left, before = done * rows_each, []
    for attempt, rows in parts:
        before.append([attempt, *(min(left, len(rows)) if table == "evaluations" else 0 for table in schema.TABLES)])
        left -= min(left, len(rows))
    return done, before


def rows_evaluated(run: Path, before: list[list[int]]) -> schema.LogRows:
    """The rows of `evaluations` that `evaluated` says come before."""
    parts = [Rows(run / schema.evaluator_file(each), dict(zip(schema.TABLES, counts, strict=True))) for each, *counts in before]
    return schema.joined("evaluations", [part.rows("evaluations") for part in parts])


def check_rows(run: Path, shard: int, rows: list[list[int]]) -> None:
    """Whether the rows are there that a checkpoint says come before it (`schema`, `continues`), and are those that were written.

    Raises DataError where not: the run could not be finished.
    """
    for attempt, *counts in rows:
        if any(counts):  # else there was no log
            part = Rows(run / schema.shard_file(shard, attempt), dict(zip(schema.TABLES, counts, strict=True)))
            for table in schema.TABLES:
                for _ in part.chunks(table):
                    pass
