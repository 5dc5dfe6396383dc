"""The log up to the checkpoint from which a run goes on."""

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
    """Return the first snapshot to evaluate, and the rows before (`schema`, `continues`).

    No checkpoint waits for the evaluator: a log torn by a loss of power is passed over, and the attempt before counts.

    Args:
        snapshots: taken at the checkpoint.
        rows_each: of one snapshot.
    """
    parts: list[tuple[int, np.ndarray]] = []
    for attempt in reversed(attempts):
        path = run / schema.evaluator_file(attempt)
        if path.is_file():
            try:
                parts = [(attempt_of(each.path), each.rows("evaluations")) for each in continued(path)]
                break
            except DataError as error:
                complain(f"{error}; the evaluations of this file are made again")
    done = sum(int(np.count_nonzero(rows["snapshot"] < snapshots)) for _, rows in parts) // rows_each
    left, before = done * rows_each, []
    for attempt, rows in parts:
        before.append([attempt, *(min(left, len(rows)) if table == "evaluations" else 0 for table in schema.TABLES)])
        left -= min(left, len(rows))
    return done, before


def rows_evaluated(run: Path, before: list[list[int]]) -> schema.LogRows:
    parts = [Rows(run / schema.evaluator_file(each), dict(zip(schema.TABLES, counts, strict=True))) for each, *counts in before]
    return schema.joined("evaluations", [part.rows("evaluations") for part in parts])


def check_rows(run: Path, shard: int, rows: list[list[int]]) -> None:
    """Raise DataError unless the rows before a checkpoint are there, unchanged (`schema`, `continues`)."""
    for attempt, *counts in rows:
        if any(counts):  # else there was no log
            part = Rows(run / schema.shard_file(shard, attempt), dict(zip(schema.TABLES, counts, strict=True)))
            for table in schema.TABLES:
                for _ in part.chunks(table):
                    pass
