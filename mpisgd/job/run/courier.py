"""Carrier of files between ranks beside the loops: each end in its own thread, over its own communicator."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import MAGIC
from mpisgd.comm.mpi.library import MPI

_HEADER, _BODY = 1, 2
_LOOK_S, _MOVE_S = 0.05, 0.002
_LONGEST_S = 60.0
"""Seconds for a file: a hung rank holds up no other for longer."""
_PIECE = 8 << 20
"""Bytes sent at a time: memory for a whole file costs the taker more than copying."""
_END_S = 5.0


class Courier:
    """Courier of a rank; collective over `comm`.

    Args:
        sources: ranks that send files here.
        take: takes two numbers and two files, in pieces, each gone with the next; may raise OSError.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sources: Collection[int],
        take: Callable[[int, int, Iterable[np.ndarray], Iterable[np.ndarray]], None],
        complain: Callable[[str], None],
    ) -> None:
        self._comm = comm.Dup()
        self._sources, self._take, self._complain = frozenset(sources), take, complain
        self._over = threading.Event()
        self._torn = False
        """A file was given up half-way: the communicator is not freed."""
        self._kept: list[MPI.Request] = []
        """Requests given up, with memory that MPI may still use."""
        self._thread = threading.Thread(target=self._serve, name="courier", daemon=True)
        if sources:
            self._thread.start()

    def send(self, dest: int, one: int, other: int, files: tuple[Path, Path]) -> None:
        """Send two numbers and two files. Raises PeerError if not received, OSError if unreadable."""
        bodies = [np.memmap(path, np.uint8, "r") for path in files]
        header = np.array([MAGIC, one, other, *map(len, bodies)], np.int64)
        try:
            self._wait(self._comm.Issend(header, dest, _HEADER), dest, _until_s())
            for body in bodies:
                until_s = _until_s()
                for start in range(0, len(body), _PIECE):
                    self._wait(self._comm.Issend(body[start : start + _PIECE], dest, _BODY), dest, until_s)
        except MPI.Exception as error:
            self._torn = True
            raise PeerError(f"rank {dest} cannot be reached: {error}", dest) from error

    def close(self) -> None:
        """End, once all have sent; collective."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        if not (self._torn or self._thread.is_alive()):
            self._comm.Free()

    def _serve(self) -> None:
        status = MPI.Status()
        while not self._over.wait(_LOOK_S):
            try:
                message = self._comm.Improbe(MPI.ANY_SOURCE, _HEADER, status)
                if message is not None:
                    self._receive(status.source, status.Get_elements(MPI.BYTE), message)
            except (OSError, PeerError) as error:
                self._complain(str(error))
            except MPI.Exception as error:  # a rank has died, or all are to end
                self._torn = True
                self._complain(f"nothing more is taken from other nodes: {error}")
                return

    def _receive(self, source: int, nbytes: int, message: MPI.Message) -> None:
        header = np.zeros(max(5, -(-nbytes // 8)), np.int64)
        message.Recv(header)
        magic, one, other, *sizes = header.tolist()
        if nbytes != 40 or magic != MAGIC or source not in self._sources or min(sizes) < 0:
            self._torn = True
            raise PeerError(f"rank {source} sends {nbytes} bytes that are no files' header", source)
        bodies = [self._pieces(source, size) for size in sizes]
        try:
            self._take(one, other, *bodies)
        except OSError:
            for _ in itertools.chain(*bodies):
                pass  # the rest is sent all the same
            raise

    def _pieces(self, source: int, nbytes: int) -> Iterator[np.ndarray]:
        """Receive a file, each piece into the memory of the last."""
        room, until_s = np.empty(min(nbytes, _PIECE), np.uint8), _until_s()
        for start in range(0, nbytes, _PIECE):
            piece = room[: nbytes - start]
            self._wait(self._comm.Irecv(piece, source, _BODY), source, until_s)
            yield piece

    def _wait(self, request: MPI.Request, peer: int, until_s: float) -> None:
        while not request.Test():
            if time.monotonic() > until_s:
                self._torn = True
                self._kept.append(request)
                raise PeerError(f"rank {peer} has not moved a file for {_LONGEST_S:.0f} s", peer)
            time.sleep(_MOVE_S)


def _until_s() -> float:
    return time.monotonic() + _LONGEST_S
