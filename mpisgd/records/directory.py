"""Directory of a run: claimed at the start, joined and marked DONE at the end (DESIGN 6)."""

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
from mpisgd.records.log.continuing import Layout
from mpisgd.records.log.rank_file import Rows
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import LogRows
from mpisgd.records.log.writer import CHUNK_ROWS, explain

LINKED_NBYTES = 1 << 30
"""Bytes above which `log.h5` links to a table's rows: copying 1 GiB takes seconds."""


def claim(path: Path, *, overwrite: bool) -> Lock:
    """Make and lock a run's directory; an old run is locked before its first file goes.

    Raises ConfigError if the directory exists, is no run, is another job's, or cannot be made.
    """
    require_set("out", path)
    try:
        if path.exists():
            if not overwrite:
                raise ConfigError(f"out = {str(path)!r} exists: choose another, or replace the directory by --overwrite")
            if not (_is_replaceable(path) or (path / schema.LOCK).exists()):  # a stranger's folder is not even locked
                raise _no_run(path)
            lock = Lock(path)
            if not _is_replaceable(path):
                lock.release()
                raise _no_run(path)
            _empty(path)
            return lock
        durable.make_directory(path)
    except OSError as error:
        raise ConfigError(f"out = {str(path)!r} cannot be made: {cause(error)}") from error
    return Lock(path)


def _empty(path: Path) -> None:
    for each in sorted(path.iterdir(), key=lambda each: each.name == schema.CONFIG):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != schema.LOCK:
            each.unlink(missing_ok=True)  # a job that is refused removes its own file


def _no_run(path: Path) -> ConfigError:
    return ConfigError(f"out = {str(path)!r} exists and is no run directory of mpisgd: not replaced")


def _is_replaceable(path: Path) -> bool:
    return _is_run(path) or _never_began(path)


def _is_run(path: Path) -> bool:
    """Return whether a run made the directory: some config.toml is not enough."""
    try:
        Run(path)
    except DataError:
        return False
    return True


def _never_began(path: Path) -> bool:
    """Return whether a run was killed before writing config.toml."""
    begun = (schema.LOCK, f".{schema.LOCK}.", f".{schema.CONFIG}.")
    return path.is_dir() and all(each.name == begun[0] or each.name.startswith(begun[1:]) for each in path.iterdir())


def write_config(path: Path, text: str) -> None:
    """Write config.toml, durable and whole. Raises ConfigError."""
    try:
        durable.write(path / schema.CONFIG, sums.sealed(text).encode())
    except OSError as error:
        raise ConfigError(f"out = {str(path)!r} cannot be written: {cause(error)}") from error


def join(run: Run) -> None:
    """Make `log.h5`: each table has the rows of all ranks and continued attempts.

    Rows are copied in chunks with HDF5's checksums (Fletcher32), and compared with the writers': any reader is told of a flipped
    bit. A table above `LINKED_NBYTES` is a virtual data set over the ranks' files; a missing file reads as zeros (TRAPS 8). Raises
    DataError for a missing or damaged file.
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
    place: str
    table: str
    parts: Sequence[Rows]
    dtype: np.dtype


def joined(run: Run) -> Iterator[Joined]:
    found = [(table, table, run.parts) for table in schema.TABLES]
    found += [(table, table, run.parts_of_coordinator) for table in schema.COORDINATOR if run.is_batch]
    for number, layout in enumerate(run.earlier):  # their shard numbers mean other slices
        found += [(f"layouts/{number}/{table}", table, layout.parts()) for table in ("pushes", "updates", "events")]
    for place, table, parts in found:
        yield Joined(place, table, parts, schema.common(table, [part.dtype(table) for part in parts]))


def attributes_of(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("learners", "shards", "first_clock", "last_clock")}


def _is_linked(table: Joined) -> bool:
    is_large = count_of(table) * table.dtype.itemsize > LINKED_NBYTES
    return is_large and all(part.dtype(table.table) == table.dtype for part in table.parts)


def count_of(table: Joined) -> int:
    return sum(part.length(table.table) for part in table.parts)


def links_of(table: Joined) -> list[tuple[int, int, str]]:
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
    how = {"chunks": (min(count, CHUNK_ROWS),), "fletcher32": True} if count else {}
    data = log.create_dataset(into.place, (count,), into.dtype, **how)
    data.attrs["rows"] = count
    explain(data, into.table, into.dtype)
    start = 0
    for rows in rows_of(into):
        data[start : start + len(rows)] = rows
        start += len(rows)


def rows_of(source: Joined) -> Iterator[LogRows]:
    for part in source.parts:
        for rows in part.chunks(source.table):
            yield rows if rows.dtype == source.dtype else schema.rows_as(source.dtype, [rows])


def mark_done(path: Path, contents: dict[str, Any]) -> None:
    """Write DONE, durable and whole, after the names of all files; writers have synced their files."""
    with writing(path / schema.DONE):
        durable.sync_directory(path)
        durable.write(path / schema.DONE, sums.sealed_json(contents).encode())
