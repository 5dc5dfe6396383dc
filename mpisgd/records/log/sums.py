"""Checksums of a log: so that a flipped bit is reported, and not read as a number (TRAPS 9).

HDF5's own, the filter fletcher32, is in `log.h5`, which is written once, at the end. It is not for files that are read while they
are written, or after a kill: a chunk whose writing was cut short cannot be read any more, with all its rows (measured, of a writer
that did nothing but write: 2 of 120 kills, 28 of 1200 live readings). Here the sum goes over rows that have been flushed before,
which nobody writes again, but for the field that is amended; of that the sum is written when the file is closed. HDF5's metadata
have sums of their own.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base import contained
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.schema import LogRows

#: The field of a table that is set after its row was flushed.
AMENDED = {"pushes": "answer_s"}

_BEGINS = "# crc32"
_LINE = re.compile(_BEGINS + r" of what follows: ([0-9a-f]{8})\n")


def add(crc32: int, table: str, rows: LogRows) -> int:
    """The sum of the rows before and these; what may be amended does not count."""
    if table in AMENDED:
        rows = rows.copy()
        rows[AMENDED[table]] = np.nan
    return zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data, crc32)


class Summing:
    """The check of one table of a file, while its rows are read some at a time.

    Args:
        what: the file and the table, for messages.
        whole: reads a data set of the file, which is open, by its name (`contained.whole`).
        summed: its writer kept checksums; an earlier mpisgd did not.
        there: rows that the data set has.
        committed: rows that the file says were written.
        left_open: it may be being written.

    Attributes:
        count: rows that are to be read, from the first on: at least those committed.

    Raises DataError where that cannot be.
    """

    def __init__(
        self, what: str, whole: Callable[[str], np.ndarray], summed: bool, table: str, there: int, committed: int, left_open: bool
    ) -> None:
        self._what, self._whole, self._table = what, whole, table
        self._crc32 = self._answers = 0
        self.count, self._told = committed, -1
        if summed:
            self.count, self._told = (int(each) for each in whole("sums")[schema.place(table)])
        if not 0 <= committed <= there:
            raise DataError(f"{what} has {there} rows, but {committed} were committed")
        if not (committed <= self.count <= there if left_open else committed == self.count):
            raise DataError(f"{what}: {committed} rows were committed, but the checksum is of {self.count}: the file is damaged")

    def add(self, rows: LogRows) -> None:
        if self._told >= 0:
            self._crc32 = add(self._crc32, self._table, rows)
            self._answers = add_amended(self._answers, self._table, rows)

    def check(self) -> None:
        """All have been added. Raises DataError where they are not those that were written."""
        if self._told < 0:
            return
        if self._crc32 != self._told:
            raise DataError(f"{self._what}: the rows do not have the checksum that they were written with: the file is damaged")
        closed, answers, _ = _closing(self._what, self._whole("closing"))
        if closed and self._table in AMENDED and answers != self._answers:
            raise DataError(
                f"{self._what}: {AMENDED[self._table]} does not have the checksum it was written with: the file is damaged"
            )


def add_amended(crc32: int, table: str, rows: LogRows) -> int:
    """The sum of the field that is amended, of the rows before and these."""
    return zlib.crc32(np.ascontiguousarray(rows[AMENDED[table]]).data, crc32) if table in AMENDED else crc32


def closing(answers: int, summary: np.ndarray) -> list[int]:
    """Closing entry of a file: that it was closed, the sum of what could be amended until then, and that of the summary."""
    return [1, answers, zlib.crc32(np.ascontiguousarray(summary).tobytes())]


def check_summary(what: str, file: Any) -> None:
    """Raises DataError where the summary is not the one that was written."""
    if not has_sums(file):
        return
    closed, _, crc32 = _closing(what, contained.whole(file, "closing"))
    if not closed:  # its writer was killed, failed, or is about to close it
        return
    if crc32 != closing(0, contained.whole(file, "summary"))[2]:
        raise DataError(f"{what}: it does not have the checksum that it was written with: the file is damaged")


def has_sums(file: Any) -> bool:
    """Whether its writer kept them; to ask by `in` would follow a link."""
    return bool(file.id.links.exists(b"sums"))


def _closing(what: str, entry: np.ndarray) -> list[int]:
    found: list[int] = entry.tolist()
    if found[0] not in (0, 1) or (found[0] == 0 and any(found)):
        raise DataError(f"{what}: the file does not say whether it was closed: the file is damaged")
    return found


def of_file(path: Path) -> dict[str, int]:
    """Length and CRC-32 of a file. Raises OSError."""
    nbytes = crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            nbytes, crc32 = nbytes + len(piece), zlib.crc32(piece, crc32)
    return {"nbytes": nbytes, "crc32": crc32}


def check_file(path: Path, told: Mapping[str, int]) -> None:
    """Raises DataError where a file is not the one of which `of_file` told this; OSError where it cannot be read."""
    found = of_file(path)
    if found != told:
        raise DataError(
            f"{path} is damaged: {found['nbytes']} bytes with CRC-32 {found['crc32']:08x}, written were {told['nbytes']} with"
            f" {told['crc32']:08x}"
        )


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
