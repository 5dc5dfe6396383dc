"""Safe reading of strangers' run directories: no path may lead outside, no read may hang (SECURITY.md).

Refused are symbolic links (a report or a removal could go anywhere), pipes, and HDF5 links, external storage and virtual data sets,
which show other files' bytes.
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

#: Largest HDF5 attribute; a run's attributes have one number per learner.
MOST_ATTRIBUTE_NBYTES = 16 << 20


def check_directory(run: Path) -> None:
    """Raise DataError unless a directory holds only files and directories."""
    for path, mode in _below(str(run)):
        if S_ISLNK(mode):
            raise DataError(f"{path} is a link to {_target(path)}: links in a run's directory are not followed; put the file there")
        if not (S_ISREG(mode) or S_ISDIR(mode)):
            raise DataError(f"{path} is neither a file nor a directory: nothing else is read in a run's directory")


def _below(directory: str) -> Iterator[tuple[str, int]]:
    """Yield paths and modes below a directory, but for plain files and paths removed meanwhile."""
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):  # mostly without a system call
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
    """Return a numeric data set stored in this file; `virtual` allows views, whose file names the caller checks.

    Raises ValueError if the data set is missing, linked, elsewhere, or not of numbers.
    """
    links = file.id.links
    if not links.exists(name.encode()):
        raise ValueError(f"{name} is missing")
    if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:  # `name in file` would follow the link
        raise ValueError(f"{name} is a link: links are not followed")
    opened = h5py.h5o.open(file.id, name.encode())
    if not isinstance(opened, h5py.h5d.DatasetID):
        raise ValueError(f"{name} is no data set")
    data = h5py.Dataset(opened, readonly=file.mode == "r")
    if (data.is_virtual and not virtual) or data.external:
        raise ValueError(f"{name} lies in other files: expected data in this file")
    if data.dtype.hasobject:
        raise ValueError(f"{name} has elements of any length, expected numbers")
    return data


def rows(data: h5py.Dataset, count: int) -> int:
    """Return `count`. Raises ValueError if the file is too small: rows were never written, or are compressed."""
    nbytes = count * data.id.get_type().get_size() * math.prod(data.shape[1:])
    if nbytes > h5py.h5i.get_file_id(data.id).get_filesize():
        raise ValueError(f"{count:,} rows are {nbytes:,} bytes, and the file has fewer: the file is damaged")
    return count


def whole(file: h5py.File, name: str) -> np.ndarray:
    data = data_set(file, name)
    return np.asarray(data[: rows(data, len(data))] if data.ndim else data[()])


def attribute(file: h5py.File, name: str) -> Any:
    """Return a file's numeric attribute, or None.

    Raises ValueError if the attribute is not numeric, or too large.
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
