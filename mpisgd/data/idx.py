"""The IDX format of MNIST: two zero bytes, type code, number of dimensions, each size as a big-endian uint32, the data."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpisgd.base.errors import DataError

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, item_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Array uint8 (n, *item_shape) of an IDX file, plain or gzip-compressed whatever its name.

    Raises DataError where the file is unreadable, truncated, longer than it says, or of another format or item shape.
    """
    content = _read(path)
    header = 4 + 4 * (1 + len(item_shape))
    if len(content) < header:
        raise DataError(f"{path}: {len(content)} bytes found, expected an IDX header of {header} bytes")
    magic = content[:4]
    expected_magic = bytes([0, 0, _UNSIGNED_BYTE, 1 + len(item_shape)])
    if magic != expected_magic:
        raise DataError(f"{path}: starts with 0x{magic.hex()}, expected 0x{expected_magic.hex()} (IDX, unsigned bytes)")
    samples, *found_shape = struct.unpack(f">{1 + len(item_shape)}I", content[4:header])
    if tuple(found_shape) != item_shape:
        raise DataError(f"{path}: items of shape {tuple(found_shape)}, expected {item_shape}")
    expected = header + samples * math.prod(item_shape)
    if len(content) != expected:
        raise DataError(f"{path}: {len(content)} bytes found, expected {expected} for {samples} items of shape {item_shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(samples, *item_shape)


def _read(path: Path) -> bytearray:
    """The uncompressed content; mutable, since torch wants writable memory."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not content.startswith(_GZIP_MAGIC):
        return bytearray(content)
    try:
        return bytearray(gzip.decompress(content))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: {len(content)} bytes found, expected a whole gzip file: {error}") from error
