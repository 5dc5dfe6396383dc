"""What somebody does who changes a run's files and wants it not to be seen at once: the checksums go, and the joined log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpisgd.records.log import schema, sums


def forge(file: h5py.File) -> None:
    """A log, opened to be changed, becomes one without checksums, as an earlier mpisgd wrote it."""
    if "sums" in file:
        del file["sums"]
    forget(Path(file.filename).parent)


def forget(run: Path) -> None:
    """DONE tells no more of the files of the log, as that of an earlier mpisgd did; `log.h5` goes."""
    (run / schema.LOG).unlink(missing_ok=True)
    if (run / schema.DONE).is_file():
        done = json.loads((run / schema.DONE).read_text())
        kept = {name: value for name, value in done.items() if name not in ("crc32", "files", "log")}
        (run / schema.DONE).write_text(sums.sealed_json(kept))


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
