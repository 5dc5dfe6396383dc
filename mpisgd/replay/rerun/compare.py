"""Comparison of a run, made again, with its log, row by row."""

from __future__ import annotations

import numpy as np

from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.finding import refuse

OF_THE_MACHINE = (Event.CHECKPOINT, Event.SKIPPED, Event.UNSAVED, Event.REFUSED, Event.STUCK)
"""Events that no run has again."""
_ON_TRUST = (Event.MISSED, Event.LOST)
"""Values: seconds, or a clock of weights that came to nothing."""


def compare_rows(ours: LogRows, theirs: LogRows, shard: int, table: str, *, whole: bool) -> None:
    """Raise Untrue at the first difference of a table, but for seconds; a log that is not `whole` may lack last rows."""
    if table == "events":
        ours, theirs = (rows[~np.isin(rows["kind"], OF_THE_MACHINE)] for rows in (ours, theirs))
    both = min(len(ours), len(theirs))
    first: dict[str, int] = {}
    for column in theirs.dtype.names or ():
        if not column.endswith("_s"):
            differs = _differs(ours[column][:both], theirs[column][:both])
            if table == "events" and column == "value":
                differs &= ~np.isin(theirs["kind"][:both], _ON_TRUST)
            if differs.any():
                first[column] = int(np.flatnonzero(differs)[0])
    if first:
        column = min(first, key=lambda name: first[name])
        row = first[column]
        place = {name: int(theirs[name][row]) for name in ("clock", "learner_id", "seq") if name in (theirs.dtype.names or ())}
        refuse(f"{column} {theirs[column][row]}, run again {ours[column][row]}", shard, table, row=row, **place)
    if whole and len(theirs) != len(ours):
        refuse(f"{len(theirs)} rows, run again {len(ours)}", shard, table, row=both)


def _differs(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.asarray((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)))
