"""First bytes of an HDF5 file, patched to read a file left open without the library's SWMR mode.

SWMR retries for minutes to read missing parts of a damaged or shortened file. A file that seems closed fails at once.
"""

from __future__ import annotations

import io
from pathlib import Path

from mpisgd.base.errors import DataError

_SIGNATURE = b"\x89HDF\r\n\x1a\n\x03\x08\x08"  # version 3, which SWMR implies, with addresses and lengths of 8 bytes
_NBYTES = 48
_FLAGS, _LENGTH, _SUM = 11, 28, 44


def was_left_open(path: Path) -> bool:
    """Return whether a writer has the file open, or was killed. Raises DataError for a shortened file or a damaged superblock."""
    try:
        with path.open("rb") as file:
            superblock = file.read(_NBYTES)
        actual = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5: {error}") from error
    if not superblock.startswith(_SIGNATURE) or len(superblock) < _NBYTES:
        return False
    if lookup3(superblock[:_SUM]) != int.from_bytes(superblock[_SUM:], "little"):
        raise DataError(f"{path} is damaged: the checksum of the superblock does not match")
    length = int.from_bytes(superblock[_LENGTH : _LENGTH + 8], "little")
    if actual < length:
        raise DataError(f"{path} is truncated: found {actual} bytes, expected {length}")
    return superblock[_FLAGS] != 0


class AsIfClosed(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "r")
        size = path.stat().st_size
        first = bytearray(self.read(_NBYTES))
        first[_FLAGS] = 0
        first[_LENGTH : _LENGTH + 8] = size.to_bytes(8, "little")
        first[_SUM:] = lookup3(bytes(first[:_SUM])).to_bytes(4, "little")
        self._first = bytes(first)
        self.seek(0)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        place = self.tell()
        count = super().readinto(buffer) or 0
        if place < _NBYTES and count:
            ours = self._first[place : place + count]
            buffer[: len(ours)] = ours
        return count


def lookup3(content: bytes) -> int:
    """Return Bob Jenkins' hash, HDF5's for metadata (H5_checksum_lookup3), of bytes not a multiple of 12."""
    a = b = c = (0xDEADBEEF + len(content)) & _MASK
    words = content + bytes(-len(content) % 12)
    last = len(words) - 12
    for at in range(0, len(words), 12):
        a = (a + int.from_bytes(words[at : at + 4], "little")) & _MASK
        b = (b + int.from_bytes(words[at + 4 : at + 8], "little")) & _MASK
        c = (c + int.from_bytes(words[at + 8 : at + 12], "little")) & _MASK
        if at < last:
            a, b, c = _mix(a, b, c)
    return _final(a, b, c)


_MASK = 0xFFFFFFFF


def _turn(word: int, by: int) -> int:
    return ((word << by) | (word >> (32 - by))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a, c = ((a - c) & _MASK) ^ _turn(c, 4), (c + b) & _MASK
    b, a = ((b - a) & _MASK) ^ _turn(a, 6), (a + c) & _MASK
    c, b = ((c - b) & _MASK) ^ _turn(b, 8), (b + a) & _MASK
    a, c = ((a - c) & _MASK) ^ _turn(c, 16), (c + b) & _MASK
    b, a = ((b - a) & _MASK) ^ _turn(a, 19), (a + c) & _MASK
    c, b = ((c - b) & _MASK) ^ _turn(b, 4), (b + a) & _MASK
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    c = ((c ^ b) - _turn(b, 14)) & _MASK
    a = ((a ^ c) - _turn(c, 11)) & _MASK
    b = ((b ^ a) - _turn(a, 25)) & _MASK
    c = ((c ^ b) - _turn(b, 16)) & _MASK
    a = ((a ^ c) - _turn(c, 4)) & _MASK
    b = ((b ^ a) - _turn(a, 14)) & _MASK
    return ((c ^ b) - _turn(b, 24)) & _MASK
