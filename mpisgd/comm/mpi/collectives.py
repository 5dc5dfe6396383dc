"""Ranks that act together: by collectives, or by pieces (`pieces.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpisgd.comm import pieces
from mpisgd.comm.communicator import Part
from mpisgd.comm.messages import LAYOUTS, Fields, Tag
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.waiting import Printed


class _Wait(Protocol):
    def __call__(self, words: str, request: Any, *, moves: bool = False) -> None:
        """Wait for a request, shown to watchers as `words`; `moves`: each look helps bodies along."""


_Send = Callable[[Any, int, int], Any]
_PIECES = 8
"""Pieces of weights awaited at once: few enough for the cache."""

_WEIGHTS = 0
"""Tag of weights; p + 1: part p of a gradient."""


class Parts:
    """An all-to-all by parts.

    Receives are posted at once, by part number: other ranks' passes may send in another order.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        send: _Send,
        bounds: Sequence[tuple[int, int]],
        vector: np.ndarray,
        received: np.ndarray,
        parts: Sequence[Part],
    ) -> None:
        self._place = place = comm.Get_rank()
        self._send = send
        self._vector = vector
        self._parts = parts
        start, end = bounds[place]
        self._start, self._rows = start, received.reshape(len(bounds), end - start)
        self.coming: list[MPI.Request] = []
        self.leaving: list[MPI.Request] = []
        for number, part in reversed(list(enumerate(parts))):
            if part.owner == place:
                for source in range(len(bounds)):
                    if source != place:
                        for piece in pieces.of(self._rows[source], part.start - start, part.end - start):
                            self.coming.append(comm.Irecv(piece, source, number + 1))

    def leave(self, number: int) -> None:
        part = self._parts[number]
        if part.owner == self._place:
            self._rows[self._place, part.start - self._start : part.end - self._start] = self._vector[part.start : part.end]
            return
        for piece in pieces.of(self._vector, part.start, part.end):
            self.leaving.append(self._send(piece, part.owner, number + 1))


Coming = list[tuple[slice, list[Any]]]
"""Pieces of a part, and their requests."""


class Shares:
    """An all-gather: what comes, by part, and what leaves."""

    def __init__(self, coming: list[Coming]) -> None:
        self.coming = coming
        self.leaving: list[MPI.Request] = []


class OpenShares(Shares):
    """An all-gather of slices made from their first element on; receives are posted at once."""

    def __init__(
        self, comm: MPI.Intracomm, send: _Send, bounds: Sequence[tuple[int, int]], vector: np.ndarray, parts: Sequence[Part]
    ) -> None:
        super().__init__([[] for _ in parts])
        place = comm.Get_rank()
        self._send = send
        self._others = [(place + away) % len(bounds) for away in range(1, len(bounds))]
        start, end = bounds[place]
        self._mine = vector[start:end]
        self._made = 0
        self._pieces: list[slice] = []
        """Pieces of this rank's slice still to leave, the next last."""
        size = _PIECES * (pieces.NBYTES // vector.itemsize)
        for number, part in enumerate(parts):
            if part.owner == place:
                self.coming[number].append((slice(part.start, part.end), []))
                self._pieces += pieces.cuts(part.start - start, part.end - start, vector.itemsize)
                continue
            for at in range(part.start, part.end, size):
                some = slice(at, min(at + size, part.end))
                requests = [comm.Irecv(piece, part.owner, _WEIGHTS) for piece in pieces.of(vector, some.start, some.stop)]
                self.coming[number].append((some, requests))
        self._pieces.reverse()

    def up_to(self, own: np.ndarray, stop: int) -> None:
        """Send whole pieces of the first `stop` elements, now made, to all others."""
        self._mine[self._made : stop] = own[self._made : stop]
        self._made = stop
        while self._pieces and self._pieces[-1].stop <= stop:
            piece = own[self._pieces.pop()]
            self.leaving += [self._send(piece, dest, _WEIGHTS) for dest in self._others]


class Team:
    """Ranks that act together by MPI's non-blocking collectives; `comm` is the team's own."""

    def __init__(
        self,
        wait: _Wait,
        printed: Printed,
        comm: MPI.Intracomm,
        bounds: Sequence[tuple[int, int]],
        cuts: Sequence[tuple[int, int]] = (),
        *,
        synchronous: bool = False,
    ) -> None:
        self._wait_for = wait
        self._synchronous = synchronous
        self._bounds = bounds
        self._printed = printed
        self._comm = comm
        self._moves = False  # whether parts may be under way while headers are told
        self._sizes, self._starts = _sizes_and_starts(bounds)
        self._cut_sizes, self._cut_starts = _sizes_and_starts(cuts or bounds)
        own = self._cut_sizes[comm.Get_rank()]
        self._own_sizes = [own for _ in bounds]
        self._own_starts = [own * place for place in range(len(bounds))]

    @property
    def _send(self) -> _Send:
        return self._comm.Issend if self._synchronous else self._comm.Isend

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        layout = LAYOUTS[tag]
        headers = bytearray(len(self._sizes) * layout.nbytes)
        self._printed.say("all", tag)
        self._wait(self._comm.Iallgather(layout.pack(fields), headers), moves=self._moves)
        parts = (headers[start : start + layout.nbytes] for start in range(0, len(headers), layout.nbytes))
        return [layout.unpack(part, place) for place, part in enumerate(parts)]

    def exchange(self, vector: np.ndarray, received: np.ndarray) -> None:
        self._printed.say("all", Tag.GRADIENT, vector)
        kind = _kind_of(vector)
        sent = (vector, (self._cut_sizes, self._cut_starts), kind)
        self._wait(self._comm.Ialltoallv(sent, (received, (self._own_sizes, self._own_starts), kind)))

    def begin_parts(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[Part]) -> Parts:
        self._printed.say("all", Tag.GRADIENT, vector)
        self._moves = True
        return Parts(self._comm, self._send, self._bounds, vector, received, parts)

    def leave(self, begun: Parts, number: int) -> None:
        begun.leave(number)

    def finish_parts(self, begun: Parts) -> None:
        self._wait_for_all(begun.coming)

    def see_out(self, begun: Parts) -> None:
        self._wait_for_all(begun.leaving)

    def open_shares(self, vector: np.ndarray, parts: Sequence[Part]) -> OpenShares:
        self._printed.say("all", Tag.WEIGHTS, vector)
        return OpenShares(self._comm, self._send, self._bounds, vector, parts)

    def share_up_to(self, shared: OpenShares, own: np.ndarray, stop: int) -> None:
        shared.up_to(own, stop)

    def share(self, own: np.ndarray, vector: np.ndarray) -> Shares:
        self._printed.say("all", Tag.WEIGHTS, own)
        kind = _kind_of(vector)
        return Shares([[(slice(None), [self._comm.Iallgatherv((own, kind), (vector, (self._sizes, self._starts), kind))])]])

    def arrive(self, shared: Shares, number: int, arrived: Callable[[slice], None] | None = None) -> None:
        coming, shared.coming[number] = shared.coming[number], []
        for part, requests in coming:
            self._wait_for_all(requests)
            if arrived is not None:
                arrived(part)

    def finish(self, shared: Shares, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        meanwhile()
        for number in range(len(shared.coming)):
            self.arrive(shared, number, arrived)
        self._wait_for_all(shared.leaving)

    def _wait_for_all(self, requests: list[MPI.Request]) -> None:
        """Wait in turn: a polite wait then hardly sleeps, as each look moves but a few pieces."""
        for request in requests:
            self._wait(request)

    def _wait(self, request: MPI.Request, *, moves: bool = True) -> None:
        self._wait_for(f"all {len(self._sizes)} ranks that act together", request, moves=moves)

    def disband(self) -> None:
        self._comm.Free()


def _kind_of(vector: np.ndarray) -> MPI.Datatype:
    return {"float32": MPI.FLOAT, "int16": MPI.SHORT, "int32": MPI.INT}[vector.dtype.name]


def _sizes_and_starts(bounds: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [end - start for start, end in bounds], [start for start, _ in bounds]
