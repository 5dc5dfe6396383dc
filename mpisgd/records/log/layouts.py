"""Layouts of a run: parts with other numbers of learners or shards, hence other slices (`schema`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import Rows, attempt_of, continued, read_file
from mpisgd.records.log.schema import LogRows


class Begins(NamedTuple):
    """Begin of a layout's rows (`schema`); by default, of the run.

    Attributes:
        next_seq: per learner, the first mini-batch; empty = 0.
        before: of the layout before: shard, attempt, rows of each table.
    """

    clock: int = 0
    samples: int = 0
    time_s: float = 0.0
    next_seq: list[int] = []  # noqa: RUF012 - never changed
    before: list[tuple[int, int, dict[str, int]]] = []  # noqa: RUF012

    def rows_before(self, run: Path) -> list[list[Rows]]:
        shards = 1 + max((shard for shard, _, _ in self.before), default=-1)
        return [
            [Rows(run / schema.shard_file(shard, attempt), counts) for at, attempt, counts in self.before if at == shard]
            for shard in range(shards)
        ]


@dataclass(frozen=True)
class Layout:
    """A part of a run between two clocks; `rows`: of each shard, by attempt."""

    learners: int
    first_clock: int
    last_clock: int
    rows: list[list[Rows]]

    @property
    def shards(self) -> int:
        return len(self.rows)

    def table(self, name: str) -> LogRows:
        parts = [rows.rows(name) for shard in self.rows for rows in shard]
        return schema.joined(name, parts)

    def parts(self) -> list[Rows]:
        return [rows for shard in self.rows for rows in shard]


def begins(path: Path) -> Begins:
    """Read where the layout of a shard's file begins. Raises DataError."""
    first = continued(path)[0].path

    def read(file: h5py.File, _: bool) -> Begins:
        before = safe_read.attribute(file, "before")
        if before is None:
            return Begins()
        parts = np.asarray(before, np.int64).reshape(-1, 2 + len(schema.TABLES)).tolist()
        own = attempt_of(first)
        if not all(0 <= shard < len(parts) and 0 <= attempt < own for shard, attempt, *_ in parts):
            raise DataError(f"{first}: the attribute before names shards or attempts impossible before attempt {own}")
        return Begins(
            int(safe_read.attribute(file, "continues_clock")),
            int(safe_read.attribute(file, "begins_samples")),
            float(safe_read.attribute(file, "begins_s")),
            np.asarray(safe_read.attribute(file, "begins_seq"), np.int64).tolist(),
            [(shard, attempt, dict(zip(schema.TABLES, counts, strict=True))) for shard, attempt, *counts in parts],
        )

    return read_file(first, "the start of the attempt", read)
