"""Rows of a run of several attempts and layouts: which files have them, and how many (`schema`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import Rows, attempt_of, read_file
from mpisgd.records.log.schema import LogRows


def first(path: Path, counts: Iterable[int]) -> Rows:
    """Return a file's rows before another attempt; `counts`: of each table."""
    return Rows(path, dict(zip(schema.tables_of(path), counts, strict=True)))


def continued(path: Path) -> list[Rows]:
    """Return one rank's rows: of earlier attempts that this file continues, then its own. Raises DataError."""
    width = 1 + len(schema.tables_of(path))
    found = read_file(path, "what it continues", lambda file, _: safe_read.attribute(file, "continues"))
    parts = np.empty((0, width), np.int64) if found is None else np.asarray(found)
    if parts.ndim != 2 or parts.shape[1] != width:
        raise DataError(f"{path}: the attribute continues has shape {parts.shape}, expected (parts, {width})")
    attempts = [-1, *parts[:, 0].tolist(), attempt_of(path)]
    if any(one >= other for one, other in itertools.pairwise(attempts)):
        raise DataError(f"{path}: the attribute continues has attempts {attempts[1:-1]}, expected earlier attempts, in order")
    name = path.name.partition(".")[0]
    return [*(first(path.with_name(f"{name}.attempt-{attempt}.h5"), counts) for attempt, *counts in parts.tolist()), Rows(path)]


class Begins(NamedTuple):
    """Begin of a layout's rows (`schema`); by default, of the run.

    Attributes:
        next_seq: per learner, the first mini-batch; empty = 0.
        before: rows of the layout before, of each shard, by attempt.
    """

    clock: int = 0
    samples: int = 0
    time_s: float = 0.0
    next_seq: list[int] = []  # noqa: RUF012 - never changed
    before: list[list[Rows]] = []  # noqa: RUF012


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
        return schema.joined(name, [rows.rows(name) for rows in self.parts()])

    def parts(self) -> list[Rows]:
        return [rows for shard in self.rows for rows in shard]


def begins(path: Path) -> Begins:
    """Read where the layout of a shard's file begins. Raises DataError."""
    oldest = continued(path)[0].path

    def read(file: h5py.File, _: bool) -> Begins:
        before = safe_read.attribute(file, "before")
        if before is None:
            return Begins()
        parts = np.asarray(before, np.int64).reshape(-1, 2 + len(schema.TABLES)).tolist()
        own = attempt_of(oldest)
        if not all(0 <= shard < len(parts) and 0 <= attempt < own for shard, attempt, *_ in parts):
            raise DataError(f"{oldest}: the attribute before names shards or attempts impossible before attempt {own}")
        rows: list[list[Rows]] = [[] for _ in range(1 + max((shard for shard, *_ in parts), default=-1))]
        for shard, attempt, *counts in parts:
            rows[shard].append(first(path.with_name(schema.shard_file(shard, attempt)), counts))
        return Begins(
            int(safe_read.attribute(file, "continues_clock")),
            int(safe_read.attribute(file, "begins_samples")),
            float(safe_read.attribute(file, "begins_s")),
            np.asarray(safe_read.attribute(file, "begins_seq"), np.int64).tolist(),
            rows,
        )

    return read_file(oldest, "the start of the attempt", read)


def evaluated(
    run: Path, attempts: Mapping[int, int], snapshots: int, rows_each: int, complain: Callable[[str], None] = lambda why: None
) -> tuple[int, list[list[int]]]:
    """Return the first snapshot to evaluate, and the rows before (`schema`, `continues`).

    No checkpoint waits for the evaluator: a log torn by a loss of power is passed over, and the attempt before counts.

    Args:
        attempts: clock at which each began; snapshots after this clock are made anew.
        snapshots: taken at the checkpoint.
        rows_each: of one snapshot.
    """
    parts: list[tuple[int, np.ndarray]] = []
    last_clock: float = math.inf
    for attempt, clock in sorted(attempts.items(), reverse=True):
        path = run / schema.evaluator_file(attempt)
        if path.is_file():
            try:
                parts = [(attempt_of(each.path), each.rows("evaluations")) for each in continued(path)]
                break
            except DataError as error:
                complain(f"{error}; the evaluations of this file are made again")
        last_clock = min(last_clock, clock)
    done = 0
    for _, rows in parts:
        done += int(np.count_nonzero((rows["snapshot"] < snapshots) & (rows["clock_max"] <= last_clock)))
    done //= rows_each
    left, before = done * rows_each, []
    for attempt, rows in parts:
        before.append([attempt, *(min(left, len(rows)) if table == "evaluations" else 0 for table in schema.TABLES)])
        left -= min(left, len(rows))
    return done, before


def rows_evaluated(run: Path, before: list[list[int]]) -> LogRows:
    parts = [first(run / schema.evaluator_file(attempt), counts) for attempt, *counts in before]
    return schema.joined("evaluations", [part.rows("evaluations") for part in parts])


def check_rows(run: Path, shard: int, rows: list[list[int]]) -> None:
    """Raise DataError unless the rows before a checkpoint are there, unchanged (`schema`, `continues`)."""
    for attempt, *counts in rows:
        if any(counts):  # else there was no log
            part = first(run / schema.shard_file(shard, attempt), counts)
            for table in schema.TABLES:
                for _ in part.chunks(table):
                    pass
