"""Checksums of a log: a flipped bit is reported, never read as a number (TRAPS 9).

`log.h5`, written once, has HDF5's own, fletcher32. Files read while being written, or after a kill, cannot: a chunk cut short is
lost with all its rows (TRAPS 8). Here the sum covers flushed rows, written again only in the amended field; that field is summed
when the file is closed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.records.log.schema import LogRows

#: Field of a table set after its row was flushed.
AMENDED = {"pushes": "answer_s"}

_BEGINS = "# crc32"
_LINE = re.compile(_BEGINS + r" of what follows: ([0-9a-f]{8})\n")


def add(crc32: int, table: str, rows: LogRows) -> int:
    """Return the sum of the rows before and these, without the amended field."""
    if table in AMENDED:
        rows = rows.copy()
        rows[AMENDED[table]] = np.nan
    return zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data, crc32)


def add_amended(crc32: int, table: str, rows: LogRows) -> int:
    """Return the same sum of the amended field alone."""
    return zlib.crc32(np.ascontiguousarray(rows[AMENDED[table]]).data, crc32) if table in AMENDED else crc32


def closing(answers: int, summary: np.ndarray) -> list[int]:
    """Return the closing entry: 1, the sums of the amended field and of the summary."""
    return [1, answers, zlib.crc32(np.ascontiguousarray(summary).tobytes())]


def check_amended(what: str, table: str, entry: np.ndarray, crc32: int) -> None:
    """Raise DataError if a closed file tells another sum of the amended field."""
    closed, told, _ = _closing(what, entry)
    if closed and table in AMENDED and told != crc32:
        raise DataError(f"{what}: the checksum of {AMENDED[table]} does not match: the file is damaged")


def check_summary(what: str, file: Any) -> None:
    if not has_sums(file):
        return
    closed, _, crc32 = _closing(what, safe_read.whole(file, "closing"))
    if not closed:  # its writer was killed, failed, or is about to close it
        return
    if crc32 != closing(0, safe_read.whole(file, "summary"))[2]:
        raise DataError(f"{what}: the checksum does not match: the file is damaged")


def has_sums(file: Any) -> bool:
    """Return whether the writer kept sums; `in` would follow a link."""
    return bool(file.id.links.exists(b"sums"))


def _closing(what: str, entry: np.ndarray) -> list[int]:
    found: list[int] = entry.tolist()
    if found[0] not in (0, 1) or (found[0] == 0 and any(found)):
        raise DataError(f"{what}: the mark of a closed file is invalid: the file is damaged")
    return found


def of_file(path: Path) -> dict[str, int]:
    """Return length and CRC-32. Raises OSError."""
    nbytes = crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            nbytes, crc32 = nbytes + len(piece), zlib.crc32(piece, crc32)
    return {"nbytes": nbytes, "crc32": crc32}


def check_file(path: Path, told: Mapping[str, int]) -> None:
    """Raise DataError if a file is not as `of_file` told, OSError if unreadable."""
    found = of_file(path)
    if found != told:
        raise DataError(
            f"{path} is damaged: {found['nbytes']} bytes with CRC-32 {found['crc32']:08x}, written were {told['nbytes']} with"
            f" {told['crc32']:08x}"
        )


def sealed(text: str) -> str:
    """Return a text below its sum, a comment in TOML."""
    return f"{_BEGINS} of what follows: {zlib.crc32(text.encode()):08x}\n{text}"


def check_text(what: str, text: str) -> None:
    """Raise DataError if a sealed text was changed; a text without the first line passes."""
    if not text.startswith(_BEGINS):
        return
    found = _LINE.match(text)
    if found is None or zlib.crc32(text[found.end() :].encode()) != int(found[1], 16):
        raise DataError(
            f"{what} is damaged, or was edited: the checksum does not match; after an edit of your own, remove the first line"
        )


def sealed_json(table: Mapping[str, Any]) -> str:
    return json.dumps({**table, "crc32": _sum_of(table)}, indent=1) + "\n"


def checked(what: str, table: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a sealed table without its sum, or `known` entries of an earlier mpisgd. Raises DataError if changed."""
    own = {key: value for key, value in table.items() if key != "crc32"}
    if table["crc32"] != _sum_of(own) if "crc32" in table else set(own) - set(known):
        raise DataError(f"{what} is damaged: the checksum does not match, or is missing")
    return own


def _sum_of(table: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())
