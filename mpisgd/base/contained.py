"""A run's directory is read by people who did not write it: nothing in it may lead out of it, or to no end (SECURITY.md).

A symbolic link could have a report written, or a checkpoint removed, anywhere; a pipe would be read for ever; an HDF5 link,
external storage or a virtual data set shows other files' bytes as the run's. So none of these is followed: such a directory is no
run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

import h5py
import numpy as np

from mpisgd.base.errors import DataError

#: Bytes of an HDF5 attribute, at most: those of a run have a number for each learner.
MOST_ATTRIBUTE_NBYTES = 16 << 20


def check_directory(run: Path) -> None:
    """Raises DataError where there is something in a run's directory that is neither a file nor a directory of its own."""
    for path, mode in _below(str(run)):
        if S_ISLNK(mode):
            raise DataError(f"{path} is a link to {_target(path)}: links in a run's directory are not followed; put the file there")
        if not (S_ISREG(mode) or S_ISDIR(mode)):
            raise DataError(f"{path} is neither a file nor a directory: nothing else is read in a run's directory")


def _below(directory: str) -> Iterator[tuple[str, int]]:
    """Each path below a directory, with its mode; what is removed meanwhile was not there."""
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):  # without a call to the file system, for nearly all
                        continue
                    try:
                        mode = entry.stat(follow_symlinks=False).st_mode
                    except FileNotFoundError:
                        continue
                    yield entry.path, mode
                    if S_ISDIR(mode):
                        waiting.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"{directory} cannot be looked through: {error}") from error


def _target(path: str) -> str:
    try:
        return repr(str(Path(path).readlink()))
    except OSError:
        return "somewhere"


def data_set(file: h5py.File, name: str, *, virtual: bool = False) -> h5py.Dataset:
    """A data set of numbers that lies in this file as it is. `virtual`: or is a view of other files, whose names the caller checks.

    Raises ValueError where it is missing, behind a link, in another file, a view of others, or of things without a size.
    """
    links = file.id.links
    if not links.exists(name.encode()):
        raise ValueError(f"{name} is missing")
    if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:  # to ask whether it is there would follow it
        raise ValueError(f"{name} is a link, which is not followed")
    opened = h5py.h5o.open(file.id, name.encode())
    if not isinstance(opened, h5py.h5d.DatasetID):
        raise ValueError(f"{name} is no data set")
    data = h5py.Dataset(opened, readonly=file.mode == "r")
    if (data.is_virtual and not virtual) or data.external:
        raise ValueError(f"{name} is said to lie in other files, which are not read")
    if data.dtype.hasobject:
        raise ValueError(f"{name} has elements of any length, expected numbers")
    return data


def rows(data: h5py.Dataset, count: int) -> int:
    """Return `count`. Raises ValueError where the file is too small for so many rows: they were never written, or are packed."""
    nbytes = count * data.id.get_type().get_size() * math.prod(data.shape[1:])
    if nbytes > h5py.h5i.get_file_id(data.id).get_filesize():
        raise ValueError(f"{count:,} rows are {nbytes:,} bytes, and the file has fewer: it is damaged")
    return count


def whole(file: h5py.File, name: str) -> np.ndarray:
    """All of a data set, by `data_set` and `rows`. Raises ValueError."""
    data = data_set(file, name)
    return np.asarray(data[: rows(data, len(data))] if data.ndim else data[()])


def attribute(file: h5py.File, name: str) -> Any:
    """An attribute of a file: a number or an array of numbers; None where there is none.

    Raises ValueError where it is something else, or has more than `MOST_ATTRIBUTE_NBYTES`.
    """
    attributes = file.attrs
    if name not in attributes:
        return None
    found = h5py.h5a.open(file.id, name.encode())
    dtype = found.dtype
    nbytes = dtype.itemsize * math.prod(found.shape)
    if dtype.kind not in "iufb" or nbytes > MOST_ATTRIBUTE_NBYTES:
        raise ValueError(f"the attribute {name} is {nbytes:,} bytes of {dtype}, expected a few numbers")
    return attributes[name]
