"""The directory of a run: claimed at the start, joined and marked DONE at the end (DESIGN 6)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py

from mpisgd.errors import ConfigError, DataError
from mpisgd.records import schema, sums
from mpisgd.records.lock import Lock
from mpisgd.records.reader import Layout, Rows, Run, continued
from mpisgd.records.storage import cause, create_hdf5, give_up, writing
from mpisgd.records.superblock import was_left_open


def claim(path: Path, *, overwrite: bool) -> Lock:
    """Make the directory, and lock it; it must not exist, or be a run's directory that may be replaced.

    What is replaced is locked before the first file of it is removed: of two jobs that want to, one is refused.

    Raises ConfigError where it exists, is no run, is another job's, or cannot be made.
    """
    try:
        if path.exists():
            if not overwrite:
                raise ConfigError(f"out = {str(path)!r} exists: choose another, or say --overwrite to replace it")
            lock = Lock(path) if (path / schema.LOCK).exists() else None  # while its holder empties it, it is no run
            if not _is_run(path):
                if lock is not None:
                    lock.release()
                raise ConfigError(f"out = {str(path)!r} exists and is no run directory of mpisgd: it is not replaced")
            lock = lock or Lock(path)
            _empty(path)
            return lock
        path.mkdir(parents=True)
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


def write_config(path: Path, text: str) -> None:
    """Write config.toml, whole or not at all. Raises ConfigError where the directory cannot be written."""
    aside = path / f".{schema.CONFIG}.{os.getpid()}"
    try:
        aside.write_text(sums.sealed(text))
        aside.rename(path / schema.CONFIG)
    except OSError as error:
        raise ConfigError(f"out = {str(path)!r} cannot be written: {cause(error)}") from error


def join(path: Path, shards: int, attempt: int = 0) -> None:
    """Make `log.h5`: each table one virtual data set over the files of all ranks, and of attempts that are continued.

    Raises DataError where a file is missing: HDF5 itself would show it as empty (TRAPS 8).
    """
    names = [*(schema.shard_file(shard, attempt) for shard in range(shards)), schema.evaluator_file(attempt)]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}")
    whole = [each for name in names for each in continued(path / name)]
    earlier = Run(path).earlier
    with writing(path / schema.LOG):
        log = create_hdf5(path / schema.LOG)
        try:
            _lay_out(log, whole)
            for number, layout in enumerate(earlier):
                _add_earlier(log.create_group(f"layouts/{number}"), layout)
            log.flush()
        except BaseException:
            give_up(log)
            raise
        log.close()


def _lay_out(log: h5py.File, whole: list[Rows]) -> None:
    log.attrs["schema_version"] = schema.SCHEMA_VERSION
    for table, dtype in schema.TABLES.items():
        lengths = [each.length(table) for each in whole]
        layout = h5py.VirtualLayout(shape=(sum(lengths),), dtype=dtype)
        start = 0
        for each, length in zip(whole, lengths, strict=True):
            if length:
                layout[start : start + length] = _source(log, each, table, length)
            start += length
        log.create_virtual_dataset(table, layout)
        log[table].attrs["rows"] = sum(lengths)


def _add_earlier(group: h5py.Group, layout: Layout) -> None:
    """The rows that shards of another layout wrote, copied: their numbers mean other slices than those of the tables."""
    group.attrs["learners"], group.attrs["shards"] = layout.learners, layout.shards
    group.attrs["first_clock"], group.attrs["last_clock"] = layout.first_clock, layout.last_clock
    for table in ("pushes", "updates", "events"):
        group.create_dataset(table, data=layout.table(table))


def _source(log: h5py.File, rows: Rows, table: str, length: int) -> h5py.VirtualSource:
    """Where a virtual data set finds rows of one file.

    What a killed attempt left is copied into the log: HDF5 takes such a file for one that is being written, and a reader would have
    to know (SWMR).
    """
    if was_left_open(rows.path):
        name = f"attempts/{rows.path.stem}/{table}"
        log.create_dataset(name, data=rows.rows(table))
        return h5py.VirtualSource(".", name, shape=(length,), dtype=schema.TABLES[table])
    return h5py.VirtualSource(rows.path.name, table, shape=(length,), dtype=schema.TABLES[table])


def mark_done(path: Path, contents: dict[str, Any]) -> None:
    """Write DONE aside, sync it and rename it: it is there whole, or not at all."""
    aside = path / f".{schema.DONE}.{os.getpid()}"
    with writing(path / schema.DONE):
        with aside.open("w") as file:
            file.write(sums.sealed_json(contents))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path / schema.DONE)
