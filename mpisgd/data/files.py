"""Staged data files, and uncompressed copies of large archives, made once."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpisgd.base import durable
from mpisgd.base.errors import DataError

ENVIRONMENT = "MPISGD_DATA"
CACHE_ENVIRONMENT = "MPISGD_CACHE"
_CRC_NBYTES = 4


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


def cache_dir() -> Path:
    """Return MPISGD_CACHE, else XDG_CACHE_HOME/mpisgd, else ~/.cache/mpisgd."""
    named, base = os.environ.get(CACHE_ENVIRONMENT, ""), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "mpisgd"
    except RuntimeError as error:
        raise DataError(
            f"no directory to cache data in: {error}; name a directory by the environment variable {CACHE_ENVIRONMENT}"
        ) from error


def cached(source: Path, name: str, nbytes: int, build: Callable[[], Sequence[npt.NDArray[np.uint8]]]) -> Path:
    """Return the cache file of `source`: the arrays of `build()`, `nbytes` in all, then their CRC-32.

    The name holds size and modification time of `source`, and each rank's start checks the CRC: a changed archive or damaged copy
    is read again. Ranks wait for the first builder; without file locks each builds.
    """
    stat = source.stat()
    path = cache_dir() / f"{name}-{stat.st_size}-{stat.st_mtime_ns}-crc.bin"
    try:
        if _is_whole(path, nbytes):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_whole(path, nbytes):
                _write(path, build())
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected to keep {nbytes} uncompressed bytes of {source} there: "
            f"name a writable directory by the environment variable {CACHE_ENVIRONMENT}"
        ) from error
    return path


def _is_whole(path: Path, nbytes: int) -> bool:
    try:
        if path.stat().st_size != nbytes + _CRC_NBYTES:
            return False
    except FileNotFoundError:
        return False
    content = np.memmap(path, np.uint8, "r")
    return zlib.crc32(content[:nbytes].data) == int.from_bytes(content[nbytes:].tobytes(), "little")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
    crc32 = 0
    with durable.written_aside(path) as file:
        for array in arrays:
            crc32 = zlib.crc32(array.data, crc32)
            durable.write_all(file, array.data)
        durable.write_all(file, crc32.to_bytes(_CRC_NBYTES, "little"))
