"""Comparison of the rows of a run made again with the log's; seconds are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, LogRows, Reason, Verdict
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.proof import Proof

OF_THE_MACHINE = (Event.CHECKPOINT, Event.SKIPPED, Event.UNSAVED, Event.REFUSED)
"""Events of disks and of foreign messages: no run has the same again."""
_ON_TRUST = (Event.MISSED, Event.LOST)
"""Values: seconds, or a clock of weights that came to nothing."""
_SUMS = ("gradient_sq", "sum_sq", "rounded")
_SUMS_TOLERANCE = 1e-3
"""Relative; numpy's own number of threads sets the order of float32 sums."""
_LOSSES = ("loss", "mean_loss")
_NAMES: dict[str, Any] = {"verdict": Verdict, "reason": Reason, "kind": Event}
_OF_ROUNDING = ("rounded", "scale")


_FROM_THE_START = "from the first gradient on: have model, loss or data changed since, or generators of their own?"


def compare_rows(
    ours: LogRows,
    theirs: LogRows,
    shard: int,
    table: str,
    *,
    whole: bool,
    part: bool = False,
    tolerance: float = 0.0,
) -> None:
    """Raise Untrue at the first difference of a table, but for seconds.

    A log that is not `whole` may lack last rows, a rerun of a `part` others.
    """
    if table == "events":
        left_out = (*OF_THE_MACHINE, Event.NONFINITE) if tolerance else OF_THE_MACHINE
        ours, theirs = (rows[~np.isin(rows["kind"], left_out)] for rows in (ours, theirs))
    both, differs = min(len(ours), len(theirs)), dict[str, np.ndarray]()
    for column in theirs.dtype.names or ():
        if not (column.endswith("_s") or (tolerance and column in _OF_ROUNDING)):
            differs[column] = _differs(column, ours[column][:both], theirs[column][:both], tolerance)
    if table == "events":
        differs["value"] &= ~np.isin(theirs["kind"][:both], _ON_TRUST)
    refuse_first(differs, ours, theirs, shard, table, "run again")
    if (len(theirs) > len(ours) and not part) or (whole and len(theirs) < len(ours)):
        refuse(f"{len(theirs)} rows, run again {len(ours)}", shard, table, row=both)


def refuse_first(differs: Mapping[str, np.ndarray], ours: LogRows, theirs: LogRows, shard: int, table: str, how: str) -> None:
    """Raise Untrue at the first differing row; `how`: the way in which ours were made."""
    first = {column: int(np.argmax(wrong)) for column, wrong in differs.items() if wrong.any()}
    if first:
        column = min(first, key=lambda name: first[name])
        row = first[column]
        said, made = (_named(column, rows[column][row]) for rows in (theirs, ours))
        refuse(f"{column} {said}, {how} {made}", shard, table, **place_of(theirs, row))


def _differs(column: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        apart = np.abs(ours - theirs) if column in (*_SUMS, *_LOSSES) else np.inf
        if column in _SUMS:
            same |= apart <= max(_SUMS_TOLERANCE, 2 * tolerance) * np.maximum(np.abs(ours), np.abs(theirs))
            same |= (tolerance > 0) & (np.isnan(ours) | np.isnan(theirs))
        elif column in _LOSSES:
            same |= apart <= tolerance * np.maximum(1.0, np.abs(theirs))
    return np.asarray(~same)


def _named(column: str, value: Any) -> Any:
    kind = _NAMES.get(column)
    return kind(value).name if kind is not None and value in set(kind) else value


def place_of(rows: LogRows, row: int) -> dict[str, int]:
    names = [name for name in ("clock", "learner_id", "seq") if name in (rows.dtype.names or ())]
    return {"row": row, **{name: int(rows[name][row]) for name in names}}


def count_losses(ours: LogRows, theirs: LogRows, proof: Proof) -> None:
    """Count the gradients of shard 0, and other losses."""
    both = min(len(ours), len(theirs))
    made, said = ours["loss"][:both], theirs["loss"][:both]
    other = ~((made == said) | (np.isnan(made) & np.isnan(said)))
    if not proof.gradients and other[:1].any():
        proof.notes.append(_FROM_THE_START)
    proof.gradients += int(ours["gradients"].sum())
    proof.other_losses += int(np.count_nonzero(other))
    with np.errstate(invalid="ignore"):
        apart = np.abs(made - said)[other]
    proof.largest_loss = max(proof.largest_loss, float(np.where(np.isfinite(apart), apart, math.inf).max(initial=0.0)))


def as_before(pushes: LogRows, dtype: np.dtype) -> LogRows:
    """Return pushes as in older logs: without `scale`, or with `neighbour_s` in `compute_s`."""
    if pushes.dtype == dtype:
        return pushes
    found = np.empty(len(pushes), dtype)
    for name in dtype.names or ():
        found[name] = pushes[name]
    if "neighbour_s" in schema.extra("pushes", pushes.dtype):
        found["compute_s"] = (np.rint(1e9 * pushes["compute_s"]) + np.rint(1e9 * pushes["neighbour_s"])) * 1e-9
    return found
