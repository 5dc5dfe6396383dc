"""How a log is tampered with: rows, last words, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from mpisgd.job.parts import NO_OBJECTS
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Verdict
from mpisgd.replay.checks.finding import Finding, Untrue
from mpisgd.replay.checks.numbers import check_numbers
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record
from mpisgd.replay.checks.seconds import check_seconds
from mpisgd.replay.rerun.attempts import run_again
from tests import forge
from tests.unit.replay.tampered.conftest import Rows


def finding_of(record: Record) -> Finding | None:
    """The first disagreement of the log with the run made again."""
    proof = Proof(record.path, "", record.environment("threads"))
    try:
        check_numbers(record)
        check_seconds(record)
        run_again(record, NO_OBJECTS, proof)
    except Untrue as untrue:
        return untrue.finding
    return proof.finding


def rewrite(path: Path, table: str, change: Callable[[Rows], Rows | None], shard: int = 0) -> None:
    forge.rewrite(path / schema.shard_file(shard), table, change)


def summary(path: Path, shard: int = 0, **fields: int) -> None:
    with h5py.File(path / schema.shard_file(shard), "r+") as file:
        forge.forge(file)
        row = file["summary"][0]
        for name, value in fields.items():
            row[name] += value
        file["summary"][0] = row


def goodbye(path: Path, learner_id: int, by: int, shard: int = 0) -> None:
    """A learner says that it pushed so many gradients more."""

    def change(rows: Rows) -> None:
        rows["value"][(rows["kind"] == schema.Event.GOODBYE) & (rows["learner_id"] == learner_id)] += by

    rewrite(path, "events", change, shard)


def rows_of(path: Path, table: str = "pushes", shard: int = 0) -> Rows:
    with h5py.File(path / schema.shard_file(shard)) as file:
        rows: Rows = file[table][:]
        return rows


def stale(rows: Rows, least: int = 2) -> int:
    """A row of a gradient that was applied, of at least this staleness; not among the first, so that all have pushed before."""
    return next(at for at in range(24, len(rows)) if rows["staleness"][at] >= least and rows["verdict"][at] == Verdict.APPLY)


def here(path: Path, row: int, shard: int = 0) -> str:
    """How a place in `pushes` is named, as a pattern."""
    its = rows_of(path, shard=shard)[row]
    return re.escape(
        f"shard {shard}, pushes, row {row} (clock {its['clock']}, learner {its['learner_id']}, mini-batch {its['seq']}): "
    )


def edit(row: int, **changes: Any) -> Callable[[Rows], None]:
    """Set columns of one row; a function is given the old value."""

    def change(rows: Rows) -> None:
        for name, value in changes.items():
            rows[name][row] = value(rows[name][row]) if callable(value) else value

    return change


def up(by: float) -> Callable[[float], float]:
    return lambda value: value + by


def means(path: Path, shard: int = 0) -> None:
    """Make the mean losses of the updates agree with the pushes."""
    pushes = rows_of(path, shard=shard)

    def change(updates: Rows) -> None:
        for update in updates:
            losses = pushes["loss"][(pushes["verdict"] == Verdict.APPLY) & (pushes["clock"] == update["clock"] - 1)]
            update["mean_loss"] = sum(losses.tolist()) / len(losses)

    rewrite(path, "updates", change, shard)
