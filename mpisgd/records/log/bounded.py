"""A shard's file of which most bytes are said (`log.max_bytes`): it keeps some rows of the long tables, and exact counts of all.

The attribute `room`, int64 (2,), says how many rows of `pushes` and `updates` the file may keep; by `thinning` that tells of each
row that it has for how many it stands. Rows that are there stay: a file that is read while it is written only grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpisgd.records.log import schema
from mpisgd.records.log.counts import SLOTS, Counts, Pushes, Updates, sealed
from mpisgd.records.log.schema import LogRows
from mpisgd.records.log.thinning import UNBOUNDED, Thinning
from mpisgd.records.log.writer import CHUNK_ROWS, Rows, TableFile

_UPDATES_SHARE = 4
"""The part of the room for rows that updates have: one in so many. A protocol may make an update of every push."""
_HEAD_NBYTES = 128 << 10
"""Bytes of a file besides those rows: HDF5's index, counts, the events of a small run."""


def room_of(max_bytes: int, tables: Mapping[str, np.dtype] = schema.TABLES) -> dict[str, int]:
    """How many rows of each thinned table so many bytes have room for: whole chunks, in which HDF5 gives room. 0: any number."""
    if max_bytes == 0:
        return dict.fromkeys(schema.THINNED, UNBOUNDED)
    rows_nbytes = max_bytes - _HEAD_NBYTES
    nbytes = {"updates": rows_nbytes // _UPDATES_SHARE, "pushes": rows_nbytes - rows_nbytes // _UPDATES_SHARE}
    return {name: nbytes[name] // (tables[name].itemsize * CHUNK_ROWS) * CHUNK_ROWS for name in schema.THINNED}


def tables_of_shard(sampling: str, *, in_groups: bool, scaled: bool = False) -> dict[str, np.dtype]:
    """Tables of a shard's file, and their dtypes, where learners draw so, are groups of ranks, or scale their losses."""
    dealt, others = (schema.DEALT_SCALED, schema.SCALED) if scaled else (schema.DEALT, schema.PUSHES)
    return {**schema.TABLES, "pushes": dealt if sampling == "dealt" else schema.PUSHES_OF_GROUPS if in_groups else others}


def open_tables(path: Path | None, *, max_bytes: int, counts: Sequence[int] = (), **fields: Any) -> TableFile:
    """The file of a shard. `max_bytes`, `counts`: as for `BoundedFile`; without either it is a `TableFile`, which keeps all."""
    if path is None or not (max_bytes or counts):
        return TableFile(path, **fields)
    return BoundedFile(path, max_bytes=max_bytes, counts=counts, **fields)


class BoundedFile(TableFile):
    """A file that keeps, of its long tables, the rows that there is room for, and counts all.

    Rows are numbered as they are appended: so `append` and `amend` know nothing of this. They are chosen when they are flushed.

    Args:
        max_bytes: of the file, but for events, which are all kept; 0: without bound.
        counts: what came before this attempt (`Counts.numbers`).
    """

    def __init__(self, path: Path, *, max_bytes: int, counts: Sequence[int] = (), **fields: Any) -> None:
        self._room = room_of(max_bytes, fields.get("tables", schema.TABLES))
        self._thinning = {name: Thinning(room) for name, room in self._room.items()}
        self._counts = Counts.of(counts) if counts else Counts()
        self._marks: dict[str, int] = {}
        """Per table, how many rows had been appended when `rows` was last asked for."""
        self._at_mark = {"pushes": self._counts.pushes.numbers(), "updates": self._counts.updates.numbers()}
        self._slots: list[Rows] = []
        self._lengths = [0, 0]
        self._flushes = 0
        super().__init__(path, **fields)

    def _begin(self, file: h5py.File, shard: int, attributes: Mapping[str, Any]) -> None:
        super()._begin(file, shard, {**attributes, "room": np.array([self._room[name] for name in schema.THINNED], np.int64)})
        self._write_counts()

    def _create_more(self, file: h5py.File) -> None:
        for name in SLOTS:
            file.create_dataset(name, shape=(0,), maxshape=(None,), dtype=np.int64, chunks=(CHUNK_ROWS,))
        self._slots = [Rows(file[name]) for name in SLOTS]

    def counts(self) -> list[int]:
        numbers: list[int] = np.concatenate([self._at_mark[name] for name in schema.THINNED]).tolist()
        return numbers

    def rows(self) -> list[int]:
        self._marks = {name: self._committed[name] + self._filled[name] for name in self._committed}
        return [self._place(name, number) for name, number in self._marks.items()]

    def _place(self, name: str, number: int) -> int:
        """How many of the first so many rows are kept."""
        return self._thinning[name].kept(number) if name in self._thinning else number

    def _on_disk(self, name: str) -> int:
        return self._place(name, self._committed[name])

    def _write(self) -> None:
        for name, counted in (("pushes", self._counts.pushes), ("updates", self._counts.updates)):
            self._count(name, counted)
        super()._write()

    def _count(self, name: str, counted: Pushes | Updates) -> None:
        """Count what is in memory, and keep what it came to at the mark, if that is not on disk already."""
        rows = self._rows[name][: self._filled[name]]
        before = self._marks.get(name, -1) - self._committed[name]
        if before >= 0:
            counted.add(rows[:before])
            self._at_mark[name] = counted.numbers()
            rows = rows[before:]
        counted.add(rows)

    def _extend(self, name: str, rows: LogRows) -> None:
        if name in self._thinning:
            rows = rows[self._thinning[name].chosen(self._committed[name], len(rows))]
        if len(rows):
            super()._extend(name, rows)

    def _amend_file(self, name: str) -> None:
        if name in self._thinning:
            rule = self._thinning[name]
            amendments = self._amendments[name]
            amendments[:] = [(rule.kept(number), field, value) for number, field, value in amendments if rule.is_kept(number)]
        super()._amend_file(name)

    def _write_more(self) -> None:
        self._write_counts()

    def _write_counts(self) -> None:
        slot = self._flushes % len(SLOTS)
        vector = sealed(self._counts, self._flushes)
        if len(vector) > self._lengths[slot]:
            self._lengths[slot] = len(vector)
            self._slots[slot].extend(0, vector)
        else:
            self._slots[slot].write(0, vector)
        self._slots[slot].flush()
        self._flushes += 1

    def close(self, summary: tuple[float, ...] | None = None) -> None:
        super().close(summary)
        self._slots.clear()
