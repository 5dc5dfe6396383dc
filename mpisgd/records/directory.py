"""The directory of a run: claimed at the start, joined and marked DONE at the end (DESIGN 6)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpisgd.base import durable
from mpisgd.base.checks import require_set
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.storage import cause, create_hdf5, give_up, writing
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema, sums
from mpisgd.records.log.layouts import Layout
from mpisgd.records.log.rank_file import Rows
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import LogRows
from mpisgd.records.log.writer import explain

_CHUNK_ROWS = 1024
LINKED_NBYTES = 1 << 30
"""Bytes of a table above which `log.h5` refers to the ranks' rows in place of a copy: to copy 1 GiB takes seconds."""


def claim(path: Path, *, overwrite: bool) -> Lock:
    """Make the directory, and lock it; it must not exist, or be a run's directory that may be replaced.

    What is replaced is locked before the first file of it is removed: of two jobs that want to, one is refused.

    Raises ConfigError where it exists, is no run, is another job's, or cannot be made.
    """
    require_set("out", path)
    try:
        if path.exists():
            if not overwrite:
                raise ConfigError(f"out = {str(path)!r} exists: choose another, or say --overwrite to replace it")
            lock = Lock(path) if (path / schema.LOCK).exists() else None  # while its holder empties it, it is no run
            if not (_is_run(path) or _never_began(path)):
                if lock is not None:
                    lock.release()
                raise ConfigError(f"out = {str(path)!r} exists and is no run directory of mpisgd: it is not replaced")
            lock = lock or Lock(path)
            _empty(path)
            return lock
        durable.make_directory(path)
    except OSError as error:
        raise ConfigError(f"out = {str(path)!r} cannot be made: {cause(error)}") from error
    return Lock(path)


def _empty(path: Path) -> None:
    """Remove all but the lock; config.toml, by which it is known as a run's directory, goes last."""
    for each in sorted(path.iterdir(), key=lambda each: each.name == schema.CONFIG):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != schema.LOCK:
            each.unlink()


def _is_run(path: Path) -> bool:
    """Whether it was made by a run; a folder with some config.toml of the user's is not to be removed."""
    try:
        Run(path)
    except DataError:
        return False
    return True


def _never_began(path: Path) -> bool:
    """Whether there is nothing in it but what a run makes before its config.toml: somebody was killed then."""
    begun = (schema.LOCK, f".{schema.LOCK}.", f".{schema.CONFIG}.")
    return path.is_dir() and all(each.name == begun[0] or each.name.startswith(begun[1:]) for each in path.iterdir())


def write_config(path: Path, text: str) -> None:
    """Write config.toml, whole or not at all, and there to stay. Raises ConfigError where the directory cannot be written."""
    try:
        durable.write(path / schema.CONFIG, sums.sealed(text).encode())
    except OSError as error:
        raise ConfigError(f"out = {str(path)!r} cannot be written: {cause(error)}") from error


def join(run: Run) -> None:
    """Make `log.h5`: each table the rows of all ranks, and of attempts that are continued, one after the other.

    Rows are copied, in chunks that have HDF5's own checksums (Fletcher32), and compared with those of whoever wrote them. So
    whoever opens the file, with whatever, is told of a flipped bit, and needs no other file. A table above `LINKED_NBYTES` is a
    virtual data set over the ranks' files: made at once, and without room; a file that is missing reads as zeros (TRAPS 8).

    Raises DataError where a file is missing or damaged.
    """
    path = run.path
    names = [*(schema.shard_file(shard, run.attempt) for shard in range(run.shards)), schema.evaluator_file(run.attempt)]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}")
    with writing(path / schema.LOG), durable.made_aside(path / schema.LOG) as aside:
        log = create_hdf5(aside)
        try:
            log.attrs["schema_version"] = schema.SCHEMA_VERSION
            for number, layout in enumerate(run.earlier):
                log.create_group(f"layouts/{number}").attrs.update(attributes_of(layout))
            for each in joined(run):
                (_link if _is_linked(each) else _copy)(log, each)
            log.flush()
        except BaseException:
            give_up(log)
            raise
        log.close()


class Joined(NamedTuple):
    """A table of `log.h5`: its place in the file, and the files that its rows come from, one after the other."""

    place: str
    table: str
    parts: Sequence[Rows]
    dtype: np.dtype


def joined(run: Run) -> Iterator[Joined]:
    """The tables of `log.h5`: of this layout, of the coordinator, and of the layouts before slices were cut anew."""
    for table in schema.TABLES:
        dtype = run.evaluations.dtype if table == "evaluations" else _dtype_of(table, run.parts)
        yield Joined(table, table, run.parts, dtype)
    for table, dtype in schema.COORDINATOR.items() if run.is_batch else ():
        yield Joined(table, table, run.parts_of_coordinator, dtype)
    for number, layout in enumerate(run.earlier):  # the rows of other shards: their numbers mean other slices
        for table in ("pushes", "updates", "events"):
            yield Joined(f"layouts/{number}/{table}", table, layout.parts(), _dtype_of(table, layout.parts()))


def attributes_of(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("learners", "shards", "first_clock", "last_clock")}


def _dtype_of(table: str, parts: Sequence[Rows]) -> np.dtype:
    """The type of a table that has the rows of all these; not of `evaluations`."""
    return max((part.dtype(table) for part in parts), key=lambda each: each.itemsize, default=schema.TABLES[table])


def _is_linked(table: Joined) -> bool:
    """Whether `log.h5` is to refer to the rows of a table: there are many, and all files have the same columns."""
    is_large = count_of(table) * table.dtype.itemsize > LINKED_NBYTES
    return is_large and all(part.dtype(table.table) == table.dtype for part in table.parts)


def count_of(table: Joined) -> int:
    return sum(part.length(table.table) for part in table.parts)


def links_of(table: Joined) -> list[tuple[int, int, str]]:
    """Where `log.h5` finds the rows of a table: first row, number of rows, file; in each file the rows are the first ones."""
    found, start = [], 0
    for part in table.parts:
        if length := part.length(table.table):
            found.append((start, length, part.path.name))
        start += length
    return found


def _link(log: h5py.File, into: Joined) -> None:
    layout = h5py.VirtualLayout((count_of(into),), into.dtype)
    for start, length, name in links_of(into):
        layout[start : start + length] = h5py.VirtualSource(name, into.table, (length,), into.dtype)[:length]
    data = log.create_virtual_dataset(into.place, layout)
    data.attrs["rows"] = len(data)
    explain(data, into.table, into.dtype)


def _copy(log: h5py.File, into: Joined) -> None:
    count = count_of(into)
    how = {"chunks": (min(count, _CHUNK_ROWS),), "fletcher32": True} if count else {}
    data = log.create_dataset(into.place, (count,), into.dtype, **how)
    data.attrs["rows"] = count
    explain(data, into.table, into.dtype)
    start = 0
    for rows in rows_of(into):
        data[start : start + len(rows)] = rows
        start += len(rows)


def rows_of(source: Joined) -> Iterator[LogRows]:
    """The rows of a table, some at a time, in the type that `log.h5` has them in."""
    for part in source.parts:
        for rows in part.chunks(source.table):
            yield rows if rows.dtype == source.dtype else schema.rows_as(source.dtype, [rows])


def mark_done(path: Path, contents: dict[str, Any]) -> None:
    """Write DONE: it is there whole, or not at all, and what it refers to is there to stay before it is.

    The names of all files are in this directory, which is synced first; the files, whoever wrote them has synced.
    """
    with writing(path / schema.DONE):
        durable.sync_directory(path)
        durable.write(path / schema.DONE, sums.sealed_json(contents).encode())
