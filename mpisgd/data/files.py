"""Staged data files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpisgd.base.errors import DataError

ENVIRONMENT = "MPISGD_DATA"


def data_roots(data_dir: str) -> list[Path]:
    """Return `data_dir`, else the environment's MPISGD_DATA, else none."""
    named = data_dir or os.environ.get(ENVIRONMENT, "")
    return [Path(named).expanduser()] if named else []


def first_existing(candidates: Iterable[Path]) -> Path | None:
    for path in candidates:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        return path
    return None


def missing(what: str, looked_at: Sequence[Path], folder: str, checksum: str) -> DataError:
    places = ", ".join(str(path) for path in looked_at) or f"nowhere, as neither --data-dir nor {ENVIRONMENT} is set"
    return DataError(
        f"{what} is missing\n"
        f"  looked at: {places}\n"
        f"  put the file into {folder}; <data-dir> is named by --data-dir or the environment variable {ENVIRONMENT}\n"
        f"  the authors' file has {checksum}"
    )
