"""Writer of a rank's HDF5 file: rows are gathered in memory and appended in chunks (TRAPS 8).

One writer per file, SWMR, never reopened: readable during the run and after a kill, up to the last flush.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpisgd.base import durable, storage
from mpisgd.base.errors import StorageError
from mpisgd.comm.messages import Push
from mpisgd.protocols import Verdict
from mpisgd.records.log import schema, sums
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.update.slice_update import Step

CHUNK_ROWS = 1024
_CACHE_NBYTES = 4 << 20
"""Bound on HDF5's growing index of chunks; by default 32 MiB in every shard."""


class Rows:
    """Rows of an open dataset, by HDF5's own calls, five times as fast as h5py's slices (TRAPS 11).

    Raises OSError, RuntimeError, ValueError (`storage.writing` names the file).
    """

    def __init__(self, dataset: Any) -> None:
        self._id = dataset.id
        self._dtype = np.dtype(dataset.dtype)
        self._type = h5py.h5t.py_create(self._dtype)
        self._row: tuple[int, ...] = tuple(dataset.shape[1:])

    def extend(self, start: int, rows: LogRows) -> None:
        """Write rows behind the first `start`; later rows are dropped."""
        self._id.set_extent((start + len(rows), *self._row))
        self.write(start, rows)

    def write(self, start: int, rows: LogRows) -> None:
        """Write C-contiguous rows of the dataset's type from `start` on."""
        self._id.write(*self._places(start, len(rows)), rows, self._type)

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, *self._row), self._dtype)
        self._id.read(*self._places(start, stop - start), rows, self._type)
        return rows

    def flush(self) -> None:
        self._id.flush()

    def _places(self, start: int, count: int) -> tuple[Any, Any]:
        shape = (count, *self._row)
        there = self._id.get_space()
        there.select_hyperslab((start, *(0 for _ in self._row)), shape)
        return h5py.h5s.create_simple(shape), there


def explain(data: h5py.Dataset, table: str, dtype: np.dtype) -> None:
    for name, texts in schema.said(table, dtype).items():
        data.attrs[name] = texts


class _Table:
    """A table: rows in memory, after `committed` rows on disk, with the sum `crc32`."""

    def __init__(self, name: str, dtype: np.dtype, flush_rows: int) -> None:
        self._name = name
        self.rows = np.zeros(flush_rows, dtype)
        self.filled = self.committed = self.crc32 = 0
        self._amendments: list[tuple[int, str, float]] = []

    def amend(self, number: int, field: str, value: float) -> None:
        if number >= self.committed:
            self.rows[field][number - self.committed] = value
        else:
            self._amendments.append((number, field, value))

    def write(self, data: Rows) -> None:
        self._write_amendments(data)
        if self.filled:
            rows = self.rows[: self.filled]
            data.extend(self.committed, rows)
            data.flush()
            self.crc32 = sums.add(self.crc32, self._name, rows)
            self.committed += self.filled
            self.filled = 0

    def _write_amendments(self, data: Rows) -> None:
        chunks: dict[int, list[tuple[int, str, float]]] = {}
        for number, field, value in self._amendments:
            chunks.setdefault(number // CHUNK_ROWS, []).append((number % CHUNK_ROWS, field, value))
        self._amendments.clear()
        for chunk, amendments in chunks.items():
            start = chunk * CHUNK_ROWS
            rows = data.read(start, min(start + CHUNK_ROWS, self.committed))
            for number, field, value in amendments:
                rows[field][number] = value
            data.write(start, rows)

    def sum_of_amended(self, data: Rows) -> int:
        """Return the sum, read in pieces: a table may exceed memory."""
        crc32 = 0
        for start in range(0, self.committed if self._name in sums.AMENDED else 0, schema.STEP):
            crc32 = sums.add_amended(crc32, self._name, data.read(start, min(start + schema.STEP, self.committed)))
        return crc32


class TableFile:
    """HDF5 file of a rank, with tables to append to.

    Args:
        path: must not exist; None = keep nothing. The file gets its name with its tables.
        instead: replace an existing file: its writer can write no more to it.
        shard: -1 = evaluator.
        attributes: of an attempt that continues another (`schema`).
    """

    def __init__(
        self,
        path: Path | None,
        *,
        shard: int,
        flush_rows: int,
        flush_s: float,
        attributes: Mapping[str, Any] | None = None,
        instead: bool = False,
        tables: Mapping[str, np.dtype] = schema.TABLES,
    ) -> None:
        self.tables = dict(tables)
        self.kept = path is not None
        self._path = path or Path()
        self._file: h5py.File | None = None
        self._data: dict[str, Rows] = {}
        self._flush_rows = flush_rows
        self._flush_s = flush_s
        self._flushed_at_s = time.monotonic()
        self._tables = {name: _Table(name, dtype, flush_rows) for name, dtype in self.tables.items()}
        if path is not None:
            with self._writing():
                if path.exists() and not instead:
                    raise FileExistsError(errno.EEXIST, "the run already has this file", str(path))
                aside = schema.aside(path)
                self._file = storage.create_hdf5(aside)
                self._begin(self._file, shard, attributes or {})
                aside.rename(path)
                self._inode = path.stat().st_ino

    def _begin(self, file: h5py.File, shard: int, attributes: Mapping[str, Any]) -> None:
        cache = file.id.get_mdc_config()
        cache.max_size = _CACHE_NBYTES
        file.id.set_mdc_config(cache)
        file.attrs["schema_version"] = schema.SCHEMA_VERSION
        file.attrs["shard"] = shard
        for name, value in attributes.items():
            file.attrs[name] = value
        for name, dtype in self.tables.items():
            data = file.create_dataset(name, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(CHUNK_ROWS,))
            explain(data, name, dtype)
        file.create_dataset("committed", data=np.zeros(len(self.tables), np.int64))
        file.create_dataset("sums", data=np.zeros((len(self.tables), 2), np.int64))
        file.create_dataset("closing", data=np.zeros(3, np.int64))
        self._data = {name: Rows(file[name]) for name in (*self.tables, "committed", "sums")}
        summary = np.zeros(1, schema.SUMMARY)
        summary["shard"], summary["final_clock"] = shard, -1
        explain(file.create_dataset("summary", data=summary if shard >= 0 else summary[:0]), "summary", schema.SUMMARY)
        file.swmr_mode = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise StorageError for a failure; the file then counts as closed."""
        try:
            with storage.writing(self._path):
                yield
        except StorageError:
            if self._file is not None:
                storage.give_up(self._file, self._data)
                self._file = None
            raise

    def append(self, name: str, row: tuple[float, ...]) -> int:
        if self._file is None:
            return 0
        table = self._tables[name]
        table.rows[table.filled] = row
        number = table.committed + table.filled
        table.filled += 1
        if table.filled == self._flush_rows or time.monotonic() - self._flushed_at_s > self._flush_s:
            self.flush()
        return number

    def amend(self, name: str, number: int, field: str, value: float) -> None:
        """Set a field of an earlier row; of a flushed row, at the next flush."""
        self._tables[name].amend(number, field, value)

    def rows(self) -> list[int]:
        return [table.committed + table.filled for table in self._tables.values()]

    def flush(self) -> list[int]:
        """Write the rows, then the committed counts; return these. Raises StorageError, also if the file was removed."""
        if self._file is None:
            return [0] * len(self.tables)
        with self._writing():
            self._write()
            if self._path.stat().st_ino != self._inode:
                raise OSError(errno.ENOENT, "another file has the name of the log")
        self._flushed_at_s = time.monotonic()
        return [table.committed for table in self._tables.values()]

    def _write(self) -> None:
        for name, table in self._tables.items():
            table.write(self._data[name])
        self._replace("sums", [(table.committed, table.crc32) for table in self._tables.values()])
        self._replace("committed", [table.committed for table in self._tables.values()])

    def _replace(self, name: str, numbers: Sequence[int | tuple[int, int]]) -> None:
        self._data[name].write(0, np.array(numbers, np.int64))
        self._data[name].flush()

    def close(self, summary: tuple[float, ...] | None = None) -> None:
        """Flush, write a shard's summary, close, sync."""
        if self._file is None:
            return
        self.flush()
        with self._writing():
            if summary is not None:
                self._file["summary"][0] = np.array([summary], schema.SUMMARY)[0]
            amended = sum(table.sum_of_amended(self._data[name]) for name, table in self._tables.items())
            self._file["closing"][:] = sums.closing(amended, self._file["summary"][:])
            self._file.flush()  # may fail before closing begins
            self._data.clear()
            self._file.close()
            self._file = None
            durable.sync(self._path)  # DONE, or an attempt that goes on, refers to the file
            durable.sync_directory(self._path.parent)


_EXTRA: Mapping[str, Callable[[Push], float]] = {
    "portion": lambda push: push.portion,
    "neighbour_s": lambda push: push.neighbour_ns * 1e-9,
    "scale": lambda push: push.scale,
    "backward_s": lambda push: push.backward_ns * 1e-9,
}  # columns that only some runs have


class ShardLog:
    """Log of a shard.

    `duplex`: weights may be given before the previous push has come (`exchange/rounds.py`).
    """

    def __init__(self, file: TableFile, shard: int, *, duplex: bool = False) -> None:
        self._file = file
        self._shard = shard
        self._unanswered: dict[int, int] = {}
        self._extra = [_EXTRA[name] for name in schema.extra("pushes", file.tables["pushes"])]
        self._answered: dict[int, list[float]] | None = {} if duplex else None
        """Per learner, times of answers whose previous push is to come."""
        self._begun = set[int]()
        """Learners past their first pull, which follows no push."""

    def push(self, push: Push, clock: int, verdict: Verdict, learning_rate: float) -> None:
        if not self._file.kept:
            return
        answered = self._answered.get(push.learner_id) if self._answered is not None else None
        answer_s = answered.pop(0) if answered else math.nan
        number = self._file.append(
            "pushes",
            (
                self._shard,
                clock,
                push.timestamp,
                clock - push.timestamp,
                push.learner_id,
                push.seq,
                push.samples,
                push.gradients,
                verdict.kind,
                verdict.reason,
                verdict.weight,
                learning_rate,
                push.arrival_ns * 1e-9,
                answer_s,
                push.compute_ns * 1e-9,
                push.delay_ns * 1e-9,
                push.push_ns * 1e-9,
                push.wait_ns * 1e-9,
                push.pull_ns * 1e-9,
                push.rounded,
                push.loss,
                *[value(push) for value in self._extra],
            ),
        )
        if math.isnan(answer_s):
            self._unanswered[push.learner_id] = number

    def answered(self, learner_id: int, now_s: float) -> None:
        """Note the answer to the pull after a learner's last push."""
        if not self._file.kept:
            return
        number = self._unanswered.pop(learner_id, None)
        if number is not None:
            self._file.amend("pushes", number, "answer_s", now_s)
        elif self._answered is not None:
            if learner_id in self._begun:
                self._answered.setdefault(learner_id, []).append(now_s)
            self._begun.add(learner_id)

    def update(self, clock: int, step: Step, samples: int, *, now_s: float, update_s: float, mean_loss: float) -> None:
        self._file.append(
            "updates",
            (
                self._shard,
                clock,
                step.gradients,
                samples,
                step.learning_rate,
                now_s,
                update_s,
                mean_loss,
                step.gradient_sq,
                step.sum_sq,
            ),
        )

    def event(self, kind: Event, clock: int, now_s: float, learner_id: int = -1, value: float = math.nan) -> None:
        self._file.append("events", (self._shard, clock, kind, learner_id, value, now_s))

    def rows(self) -> list[int]:
        return self._file.rows()

    def flush(self) -> list[int]:
        return self._file.flush()

    def summary(self, final_clock: int, samples: int, received: int, pushed: int, diverged: bool) -> None:
        self._file.close((self._shard, final_clock, samples, received, pushed, diverged))


class EvaluatorLog:
    def __init__(self, open_file: Callable[[], TableFile]) -> None:
        self._open = open_file
        self._file: TableFile

    def begin(self) -> None:
        self._file = self._open()

    def evaluation(self, **fields: float) -> None:
        """Write a row of `evaluations`; keywords are columns, missing metrics NaN."""
        self._file.append("evaluations", tuple(fields.get(name, math.nan) for name in self._file.tables["evaluations"].names or ()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
