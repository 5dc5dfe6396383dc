"""Memory shared by ranks of a node, without a name: nothing is left of a killed job.

Each rank makes a memfd, which the others open as /proc/PID/fd/N. In containers whose processes do not see each other, files in
/dev/shm do instead, unlinked once mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mpisgd.comm.mpi.library import MPI

_SHARED = Path("/dev/shm")
_TOLD_NBYTES = 128
_Wait = Callable[..., None]
_fence = threading.Lock()
_fence.acquire()


class Segment:
    """Memory of the ranks of `comm`, and their barrier; `maps`: each rank's, by place."""

    def __init__(self, wait: _Wait, comm: MPI.Intracomm, maps: list[np.ndarray]) -> None:
        self.place: int = comm.Get_rank()
        self.places: int = comm.Get_size()
        self._wait_for = wait
        self._comm = comm
        self._maps = maps

    def bytes_of(self, place: int) -> np.ndarray:
        return self._maps[place]

    def meet(self) -> None:
        """Publish own stores, and see others'."""
        _order()
        self._wait_for("its team", self._comm.Ibarrier())
        _order()

    def disband(self) -> None:
        self._maps.clear()
        self._comm.Free()


def _order() -> None:
    """Order memory accesses: a lock's release and acquisition are a full barrier, on POWER and Arm, too."""
    _fence.release()
    _fence.acquire()


def share(wait: _Wait, comm: MPI.Intracomm, sizes: Sequence[int]) -> Segment | None:
    """Return memory of `sizes` bytes, by place, none 0; None if these ranks cannot share."""
    maps = _shared(wait, comm, sizes, _nameless) or _shared(wait, comm, sizes, _unlinked)
    if maps is None:
        comm.Free()
        return None
    return Segment(wait, comm, maps)


def _shared(
    wait: _Wait, comm: MPI.Intracomm, sizes: Sequence[int], make: Callable[[int, ExitStack], str]
) -> list[np.ndarray] | None:
    """Return all ranks' memory, by place; None unless all have mapped all."""
    own, told = np.zeros(_TOLD_NBYTES, np.uint8), np.zeros((comm.Get_size(), _TOLD_NBYTES), np.uint8)
    mapped, least = np.zeros(1, np.int64), np.zeros(1, np.int64)
    with ExitStack() as until_mapped:
        with contextlib.suppress(OSError, AttributeError):  # Linux alone has memfd_create
            path = make(sizes[comm.Get_rank()], until_mapped)
            words = f"{_identity(path)} {path}".encode()
            own[: len(words)] = list(words)
        wait("its team", comm.Iallgather(own, told))
        maps = _maps_of([bytes(each).rstrip(b"\0").decode() for each in told], sizes)
        mapped[0] = len(maps)
        wait("its team", comm.Iallreduce(mapped, least, op=MPI.MIN))
    return maps if least[0] == len(sizes) else None


def _nameless(nbytes: int, until_mapped: ExitStack) -> str:
    file = os.memfd_create("mpisgd")
    until_mapped.callback(os.close, file)
    os.truncate(file, nbytes)  # pages come as they are written
    return f"/proc/{os.getpid()}/fd/{file}"


def _unlinked(nbytes: int, until_mapped: ExitStack) -> str:
    path = _SHARED / f"mpisgd-{secrets.token_hex(16)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    until_mapped.callback(os.close, file)
    until_mapped.callback(path.unlink)
    os.posix_fallocate(file, 0, nbytes)  # a full file system would end the run later, by SIGBUS
    return str(path)


def _identity(path: str) -> str:
    found = Path(path).stat()
    return f"{found.st_dev}:{found.st_ino}"


def _maps_of(told: Sequence[str], sizes: Sequence[int]) -> list[np.ndarray]:
    """Map files up to the first failure; a path may name another file in this rank's container."""
    maps = list[np.ndarray]()
    with contextlib.suppress(OSError, ValueError):
        for each, nbytes in zip(told, sizes, strict=True):
            identity, path = each.split()
            if _identity(path) != identity:
                break
            file = os.open(path, os.O_RDWR)
            try:
                maps.append(np.frombuffer(mmap.mmap(file, nbytes), np.uint8))
            finally:
                os.close(file)
    return maps
