"""Checksums of a log: so that a flipped bit is reported, and not read as a number (TRAPS 9).

HDF5's own, the filter fletcher32, is not for files that are read while they are written, or after a kill: a chunk whose writing was
cut short cannot be read any more, with all its rows (measured, of a writer that did nothing but write: 2 of 120 kills, 28 of 1200
live readings). Here the sum goes over rows that have been flushed before, which nobody writes again, but for the fields that are
amended; of those the sum is written when the file is closed. HDF5's metadata have sums of their own.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpisgd.errors import DataError
from mpisgd.records import schema

#: Fields that are set after their row was flushed.
AMENDED = {"pushes": ("answer_s",)}

_BEGINS = "# crc32"
_LINE = re.compile(_BEGINS + r" of what follows: ([0-9a-f]{8})\n")


def add(crc32: int, table: str, rows: np.ndarray) -> int:
    """The sum of the rows before and these; what may be amended does not count."""
    for name in AMENDED.get(table, ()):
        rows = rows.copy()
        rows[name] = np.nan
    return zlib.crc32(np.ascontiguousarray(rows).tobytes(), crc32)


def closing(rows: dict[str, np.ndarray], summary: np.ndarray) -> list[int]:
    """What is written when a file is closed: that it was, and the sums of what could still be amended, and of the summary.

    `rows`: of each table in `AMENDED`, at least these columns.
    """
    crc32 = 0
    for table, names in AMENDED.items():
        for name in names:
            crc32 = zlib.crc32(np.ascontiguousarray(rows[table][name]).tobytes(), crc32)
    return [1, crc32, zlib.crc32(np.ascontiguousarray(summary).tobytes())]


def check_table(what: str, file: Any, table: str, committed: int, left_open: bool) -> None:
    """Raises DataError where the rows of a table are not those that were written; `left_open`: the file may be being written."""
    if "sums" not in file:  # a log of an earlier mpisgd
        return
    count, crc32 = (int(each) for each in file["sums"][list(schema.TABLES).index(table)])
    if not (committed <= count if left_open else committed == count):
        raise DataError(f"{what}: {committed} rows were committed, but the checksum is of {count}: the file is damaged")
    data = file[table]
    if not 0 <= count <= len(data) or add(0, table, data[:count]) != crc32:
        raise DataError(f"{what}: the rows do not have the checksum that they were written with: the file is damaged")
    closed, answers, _ = _closing(what, file)
    if closed and table in AMENDED and answers != closing(_amended(file), file["summary"][:])[1]:
        raise DataError(f"{what}: {', '.join(AMENDED[table])} does not have the checksum it was written with: the file is damaged")


def check_summary(what: str, file: Any) -> None:
    """The same of the summary."""
    if "sums" not in file:
        return
    summary = file["summary"][:]
    closed, _, crc32 = _closing(what, file)
    if not closed:  # its writer was killed, failed, or is about to close it
        return
    if crc32 != closing(_amended(file), summary)[2]:
        raise DataError(f"{what}: it does not have the checksum that it was written with: the file is damaged")


def _closing(what: str, file: Any) -> list[int]:
    found: list[int] = file["closing"][:].tolist()
    if found[0] not in (0, 1) or (found[0] == 0 and any(found)):
        raise DataError(f"{what}: the file does not say whether it was closed: the file is damaged")
    return found


def _amended(file: Any) -> dict[str, np.ndarray]:
    """Those rows that were there when the file was closed."""
    counts = file["sums"][:, 0].tolist()
    return {table: file[table][: counts[list(schema.TABLES).index(table)]] for table in AMENDED}


def sealed(text: str) -> str:
    """A text with its sum in a first line, a comment in TOML; a text that was cut short has another."""
    return f"{_BEGINS} of what follows: {zlib.crc32(text.encode()):08x}\n{text}"


def check_text(what: str, text: str) -> None:
    """Raises DataError where a sealed text was changed; one without a first line that says so is as good as its author."""
    if not text.startswith(_BEGINS):
        return
    found = _LINE.match(text)
    if found is None or zlib.crc32(text[found.end() :].encode()) != int(found[1], 16):
        raise DataError(f"{what} is damaged, or was edited: its checksum is another; where you meant it, remove its first line")


def sealed_json(table: Mapping[str, Any]) -> str:
    """A table as JSON, with its sum as one more entry."""
    return json.dumps({**table, "crc32": _sum_of(table)}, indent=1) + "\n"


def checked(what: str, table: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """A sealed table without its sum, or one of these entries alone, of an earlier mpisgd.

    Raises DataError where it is not as it was sealed.
    """
    own = {key: value for key, value in table.items() if key != "crc32"}
    if table["crc32"] != _sum_of(own) if "crc32" in table else set(own) - set(known):
        raise DataError(f"{what} is damaged: its checksum is another, or not there")
    return own


def _sum_of(table: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())
