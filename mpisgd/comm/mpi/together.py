"""Ranks that act together: by collectives, or in memory that a node shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.messages import LAYOUTS, Fields, Tag
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.waiting import Printed

_PAGE = 4096
_Wait = Callable[[str, Any], None]
"""Waits for a request, which these words say to watchers."""


class Team:
    """Ranks that act together, by MPI's non-blocking collectives, each waited for like any other request.

    Args:
        comm: theirs, in the order of places; belongs to the team.
        bounds: the slice of a vector that each place owns, in elements.
        cuts: of one that is exchanged, where that is not `bounds`.
    """

    def __init__(
        self,
        wait: _Wait,
        printed: Printed,
        comm: MPI.Intracomm,
        bounds: Sequence[tuple[int, int]],
        cuts: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._wait_for = wait
        self._printed = printed
        self._comm = comm
        self._sizes, self._starts = _sizes_and_starts(bounds)
        self._cut_sizes, self._cut_starts = _sizes_and_starts(cuts or bounds)
        own = self._cut_sizes[comm.Get_rank()]
        self._own_sizes = [own for _ in bounds]
        self._own_starts = [own * place for place in range(len(bounds))]

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """All-gather of headers."""
        layout = LAYOUTS[tag]
        headers = bytearray(len(self._sizes) * layout.nbytes)
        self._printed.say("all", tag, 0)
        self._wait(self._comm.Iallgather(layout.pack(fields), headers))
        parts = (headers[start : start + layout.nbytes] for start in range(0, len(headers), layout.nbytes))
        return [layout.unpack(part, place) for place, part in enumerate(parts)]

    def exchange(self, vector: np.ndarray, received: np.ndarray) -> None:
        """All-to-all of slices."""
        self._printed.say("all", Tag.GRADIENT, vector.nbytes)
        kind = _kind_of(vector)
        sent = (vector, (self._cut_sizes, self._cut_starts), kind)
        self._wait(self._comm.Ialltoallv(sent, (received, (self._own_sizes, self._own_starts), kind)))

    def share(self, own: np.ndarray, vector: np.ndarray) -> MPI.Request:
        """Begin an all-gather of slices."""
        self._printed.say("all", Tag.WEIGHTS, own.nbytes)
        kind = _kind_of(vector)
        return self._comm.Iallgatherv((own, kind), (vector, (self._sizes, self._starts), kind))

    def finish(self, shared: MPI.Request, meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self._wait(shared)

    def _wait(self, request: MPI.Request) -> None:
        self._wait_for(f"all {len(self._sizes)} ranks that act together", request)

    def disband(self) -> None:
        self._comm.Free()


def _kind_of(vector: np.ndarray) -> MPI.Datatype:
    return {"float32": MPI.FLOAT, "int16": MPI.SHORT, "int32": MPI.INT}[vector.dtype.name]


def _sizes_and_starts(bounds: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [end - start for start, end in bounds], [start for start, _ in bounds]


class Node:
    """Ranks that share memory: windows of MPI-3 (`MPI_Win_allocate_shared`), in the unified model, and a barrier.

    Args:
        comm: theirs, in the order of places; belongs to the node.

    MPI refuses ranks that cannot share memory, and Open MPI says so where there is too little of it (in a container, /dev/shm is
    often small).
    """

    def __init__(self, wait: _Wait, comm: MPI.Intracomm) -> None:
        self.place: int = comm.Get_rank()
        self.places: int = comm.Get_size()
        self._wait_for = wait
        self._comm = comm
        self._windows: list[MPI.Win] = []

    def vectors(self, count: int, size: int) -> list[np.ndarray]:
        """Each begins a page, so none shares a cache line with another."""
        room = -(-4 * size // _PAGE) * _PAGE
        memory = self._allocate(count * room)
        return [memory[at * room : at * room + 4 * size].view(np.float32) for at in range(count)]

    def words(self, count: int) -> np.ndarray:
        return self._allocate(8 * count).view(np.float64)

    def _allocate(self, nbytes: int) -> np.ndarray:
        """Shared bytes, which the rank in place 0 asks for; their pages go to the rank that first writes to them."""
        window = MPI.Win.Allocate_shared(nbytes if self.place == 0 else 0, 1, comm=self._comm)
        window.Lock_all(MPI.MODE_NOCHECK)  # without an epoch there is no Sync
        self._windows.append(window)
        memory: Any = window.Shared_query(0)[0]
        shared: np.ndarray = np.frombuffer(memory, np.uint8, count=nbytes)
        return shared

    def meet(self) -> None:
        """Make visible what was stored before, and see what the others stored (MPI-4.1, 12.5.4)."""
        for window in self._windows:
            window.Sync()
        self._wait_for("its team", self._comm.Ibarrier())
        for window in self._windows:
            window.Sync()

    def disband(self) -> None:
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._comm.Free()
