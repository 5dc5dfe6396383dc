"""A rank's log file, in any state: finished, being written, left by a killed rank."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TypeVar

import h5py
import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema, sums
from mpisgd.records.log.schema import LogRows
from mpisgd.records.log.superblock import AsIfClosed, was_left_open

FILE = re.compile(r"(shard-(\d{3})|evaluator|coordinator)\.attempt-(\d+)\.h5$")


@dataclass(frozen=True)
class Rows:
    """Rows of a rank's file that belong to the run; `first`: how many of each table, None = all committed."""

    path: Path
    first: dict[str, int] | None = None

    @cached_property
    def _head(self) -> _Head:
        """All tables at once: opening a file takes longer than reading a short table."""
        return read_file(self.path, "its tables", partial(_read_head, self.path))

    @cached_property
    def _short(self) -> dict[str, np.ndarray]:
        """Short tables, read several times at the end of a run; a damaged table is absent."""
        try:
            return self._head.short
        except DataError:
            return {}

    def rows(self, table: str) -> LogRows:
        """Return a table's rows. Raises DataError if unreadable or too few."""
        rows = self._short[table] if table in self._short else read_table(self.path, table)
        return rows[: self._count(table, len(rows))]

    def chunks(self, table: str) -> Iterator[LogRows]:
        """Yield rows in pieces; damage may be reported after the rows."""
        if table in self._short:
            yield self.rows(table)
            return
        open_ = was_left_open(self.path)
        with _open(self.path, open_) as file:
            found = _Table(self.path, file, table, open_, partial(safe_read.whole, file))
            left = self._count(table, found.committed)
            for rows in found.chunks():
                yield rows[:left]
                left -= min(left, len(rows))

    def length(self, table: str) -> int:
        """Return the number of rows, fixed at the first call for any table."""
        return self._count(table, self._head.committed[table])

    def dtype(self, table: str) -> np.dtype:
        return self._head.dtypes[table]

    def _count(self, table: str, committed: int) -> int:
        count = committed if self.first is None else self.first[table]
        if committed < count:
            raise DataError(f"{self.path}: table {table} has {committed} rows: another attempt continues after {count}")
        return count


@dataclass(frozen=True)
class _Head:
    """Layouts and committed rows of tables; of a closed file, short tables, read-only."""

    dtypes: dict[str, np.dtype]
    committed: dict[str, int]
    short: dict[str, np.ndarray]


def _read_head(path: Path, file: h5py.File, open_: bool) -> _Head:
    dtypes, committed, short = {}, {}, {}
    whole = _reading(file, open_)
    for name in schema.tables_of(path):
        try:
            data = safe_read.data_set(file, name)
            dtypes[name], committed[name] = data.dtype, _committed(whole, name, data)
        except _BROKEN as error:
            raise DataError(f"{path}: table {name} cannot be read: {error}") from error
        if not open_ and committed[name] <= _SHORT:
            with suppress(DataError):
                short[name] = _Table(path, file, name, open_, whole, data).rows()
                short[name].flags.writeable = False
    return _Head(dtypes, committed, short)


def appointed_of(path: Path) -> int:
    """Return 1 if shard 0 wrote this file in place of the evaluator, else 0."""
    if not path.is_file():
        return 0
    found = read_file(path, "who wrote it", lambda file, _: safe_read.attribute(file, "appointed"))
    return 0 if found is None else int(found)


def attempt_of(path: Path) -> int:
    match = FILE.match(path.name)
    assert match
    return int(match[3])


def _open(path: Path, open_: bool) -> h5py.File:
    """Open a file, even while being written (`superblock`)."""
    try:
        source = AsIfClosed(path) if open_ else path
        file = h5py.File(source, "r", libver="latest", **({} if source is not path else {"locking": False}))
    except _BROKEN as error:
        raise DataError(f"{path} cannot be read as HDF5: {error}") from error
    try:
        version, shard, attempt, room = (safe_read.attribute(file, name) for name in ("schema_version", "shard", "attempt", "room"))
    except (DataError, *_BROKEN) as error:
        file.close()
        raise DataError(f"{path} cannot be read as HDF5: {error}") from error
    if version != schema.SCHEMA_VERSION:
        file.close()
        raise DataError(f"{path} has schema version {version}, this mpisgd reads {schema.SCHEMA_VERSION}")
    if room is not None or file.id.links.exists(b"counts_0"):
        file.close()
        raise DataError(
            f"{path} is not read: log.max_bytes, now gone, bounded the file, and rows may be missing; read the file with the"
            f" mpisgd of the version and commit in {schema.CONFIG}"
        )
    match = FILE.match(path.name)
    if match and (shard, attempt or 0) != (int(match[2] or -1), int(match[3])):
        file.close()
        raise DataError(f"{path} is of shard {shard} in attempt {attempt or 0} (-1 = of none): the file was moved, or is damaged")
    return file


_BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)

_TRIES, _PAUSE_S = 5, 0.05

_SHORT = 1024
"""Rows of a table kept in memory: some 100 KiB."""

T = TypeVar("T")


def read_file(path: Path, what: str, read: Callable[[h5py.File, bool], T]) -> T:
    """Read a file by `read`, told whether a writer left it open; then retry some times. Raises DataError."""
    for left in reversed(range(_TRIES)):
        open_ = True
        try:
            open_ = was_left_open(path)
            with _open(path, open_) as file:
                return read(file, open_)
        except (DataError, *_BROKEN) as error:
            if not left or not open_:
                if isinstance(error, DataError):
                    raise
                raise DataError(f"{path}: {what} cannot be read: {error}") from error
        time.sleep(_PAUSE_S)
    raise AssertionError


def read_table(path: Path, name: str) -> LogRows:
    """Read a table's committed rows. Raises DataError if changed."""
    return read_tables(path, (name,))[0]


def read_tables(path: Path, names: Sequence[str]) -> list[LogRows]:
    def read(file: h5py.File, open_: bool) -> list[LogRows]:
        whole = _reading(file, open_)
        return [_Table(path, file, name, open_, whole).rows() for name in names]

    return read_file(path, f"table {' or '.join(names)}", read)


def _reading(file: h5py.File, open_: bool) -> Callable[[str], np.ndarray]:
    """Return `safe_read.whole`, cached unless the file is being written."""
    whole = partial(safe_read.whole, file)
    return whole if open_ else cache(whole)


def _committed(whole: Callable[[str], np.ndarray], name: str, data: h5py.Dataset) -> int:
    return safe_read.rows(data, int(whole("committed")[schema.place(name)]))


class _Table:
    """A table of an open file, checked while rows are read; `committed`: by the file's own word."""

    def __init__(
        self,
        path: Path,
        file: h5py.File,
        name: str,
        open_: bool,
        whole: Callable[[str], np.ndarray],
        data: h5py.Dataset | None = None,
    ) -> None:
        self._what, self._name, self._whole = f"{path}: table {name}", name, whole
        try:
            self._data = safe_read.data_set(file, name) if data is None else data
            self.dtype = self._data.dtype
            if not schema.fits(name, self.dtype):
                raise DataError(f"{self._what} has another layout than this mpisgd writes")
            self.committed, there = _committed(whole, name, self._data), len(self._data)
            self._summed = sums.has_sums(file)  # an earlier mpisgd kept none
            summed, self._crc32 = (int(each) for each in whole("sums")[schema.place(name)]) if self._summed else (self.committed, 0)
        except _BROKEN as error:
            raise DataError(f"{self._what} cannot be read: {error}") from error
        self._count = summed
        if not 0 <= self.committed <= there:
            raise DataError(f"{self._what} has {there} rows, but {self.committed} were committed")
        if not (self.committed <= summed <= there if open_ else self.committed == summed):
            raise DataError(
                f"{self._what}: {self.committed} rows were committed, but the checksum is of {summed}: the file is damaged"
            )

    def rows(self) -> LogRows:
        table = np.empty(self.committed, self.dtype)
        at = 0
        for rows in self.chunks():
            table[at : at + len(rows)] = rows[: len(table) - at]
            at += len(rows)
        return table

    def chunks(self) -> Iterator[LogRows]:
        """Yield rows in pieces, as far as checksums go. Raises DataError if changed, at the latest after the last."""
        crc32 = amended = 0
        try:
            for start in range(0, safe_read.rows(self._data, self._count), schema.STEP):
                rows = np.asarray(self._data[start : min(start + schema.STEP, self._count)])
                if self._summed:
                    crc32, amended = sums.add(crc32, self._name, rows), sums.add_amended(amended, self._name, rows)
                yield rows
            if self._summed:
                if crc32 != self._crc32:
                    raise DataError(f"{self._what}: the checksum of the rows does not match: the file is damaged")
                sums.check_amended(self._what, self._name, self._whole("closing"), amended)
        except _BROKEN as error:
            raise DataError(f"{self._what} cannot be read: {error}") from error


def read_sums(path: Path) -> int:
    """Return the checksum of a file's checksums; 0 = none."""

    def read(file: h5py.File, _: bool) -> int:
        if not sums.has_sums(file):
            return 0
        return zlib.crc32(safe_read.whole(file, "sums").tobytes() + safe_read.whole(file, "closing").tobytes())

    return read_file(path, "the checksums", read)


def read_summary(path: Path) -> np.ndarray:
    def read(file: h5py.File, _: bool) -> LogRows:
        sums.check_summary(f"{path}: the summary", file)
        return safe_read.whole(file, "summary")

    return read_file(path, "the summary", read)
