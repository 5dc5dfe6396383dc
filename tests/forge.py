"""What somebody does who changes a run's files and wants it not to be seen at once: the checksums go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpisgd.records.log import schema


def forge(file: h5py.File) -> None:
    """A log, opened to be changed, becomes one without checksums, as an earlier mpisgd wrote it."""
    if "sums" in file:
        del file["sums"]


def rewrite(path: Path, table: str, edit: Callable[[np.ndarray], Any]) -> None:
    """Change the rows of a table, in place or for others; where they become fewer, the count of committed rows follows."""
    with h5py.File(path, "r+") as file:
        forge(file)
        at = list(schema.TABLES).index(table)
        rows = file[table][: file["committed"][at]]
        changed = edit(rows)
        rows = rows if changed is None else changed
        file[table].resize(len(rows), axis=0)
        file[table][:] = rows
        file["committed"][at] = len(rows)


def unsealed(text: str) -> str:
    """config.toml without its first line."""
    assert text.startswith("# crc32")
    return text.partition("\n")[2]
