"""Check of `log.h5`, the readers' file, against its ranks' rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import LogRows
from mpisgd.replay.checks.finding import refuse

_BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""Errors of h5py at a damaged file."""
_DEPTH = 2


def check_joined(run: Run) -> None:
    """Raise Untrue at the first row of `log.h5`, if any, not from a rank.

    Raises DataError: unreadable file.
    """
    path = run.path / schema.LOG
    if not path.is_file():
        return
    try:
        with h5py.File(path, "r") as log:
            _compare(log, run)
    except _BROKEN as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _compare(log: h5py.File, run: Run) -> None:
    tables = {each.place: each for each in directory.joined(run)}
    found = set(_names(log))
    for name in sorted(found ^ set(tables)):
        refuse(f"{name} {'is no table of a run' if name in found else 'is missing'}", -1, schema.LOG)
    for name, table in tables.items():
        data = safe_read.data_set(log, name, virtual=True)
        if data.is_virtual:
            _compare_links(data, table)
        else:
            _compare_rows(data, name, directory.rows_of(table))
    told: dict[str, Any] = {"schema_version": schema.SCHEMA_VERSION}
    for number, layout in enumerate(run.earlier):
        told |= {f"layouts/{number}/{name}": value for name, value in directory.attributes_of(layout).items()}
    for place, value in told.items():
        group, _, name = place.rpartition("/")
        if (here := safe_read.attribute(log[group] if group else log, name)) != value:
            refuse(f"{place} = {here}, expected {value}", -1, schema.LOG)


def _compare_links(data: h5py.Dataset, table: directory.Joined) -> None:
    found = []
    for source in data.virtual_sources():
        ((start,), (last,)), first = source.vspace.get_select_bounds(), source.src_space.get_select_bounds()
        if source.dset_name != table.table or first != ((0,), (last - start,)):
            refuse(f"{table.place} refers to {source.dset_name}, rows {first}, of {source.file_name}", -1, schema.LOG)
        found.append((start, 1 + last - start, source.file_name))
    if found != directory.links_of(table) or (len(data), data.dtype) != (directory.count_of(table), table.dtype):
        refuse(f"{table.place} is not made of the rows of the ranks", -1, schema.LOG)


def _compare_rows(data: h5py.Dataset, name: str, pieces: Iterator[LogRows]) -> None:
    start = 0
    for rows in pieces:
        if not len(rows):
            continue
        mine = np.ascontiguousarray(rows)
        theirs = np.asarray(data[start : start + len(mine)])
        if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
            refuse(f"{name} has other columns, or fewer rows, than the ranks wrote", -1, schema.LOG)
        width = mine.itemsize * int(np.prod(mine.shape[1:]))
        differs = (theirs.view(np.uint8).reshape(-1, width) != mine.view(np.uint8).reshape(-1, width)).any(axis=1)
        if differs.any():
            refuse(f"{name} differs from the row of the rank", -1, schema.LOG, row=start + int(np.argmax(differs)))
        start += len(mine)
    if len(data) != start:
        refuse(f"{name} has {len(data)} rows, the ranks wrote {start}", -1, schema.LOG)


def _names(group: h5py.Group, before: str = "") -> Iterator[str]:
    """Yield places of all but groups. Raises ValueError: links, or groups deeper than a run's."""
    if before.count("/") > _DEPTH:
        raise ValueError(f"{before} lies too deep: a run's tables lie in {_DEPTH} groups at most")
    for name in group:
        if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{before}{name} is a link: links are not followed")
        inside = group[name]
        if isinstance(inside, h5py.Group):
            yield from _names(inside, f"{before}{name}/")
        else:
            yield f"{before}{name}"
