"""Bodies that leave from copies, so that nobody waits until they are received: MPI's buffered mode, in bounded memory of our own.

Where a node has more ranks than cores, a learner that waits for weights sleeps, and when it wakes it queues for a core. A shard
that waits until its answers are taken spends most of its time so, and everybody else waits for the shard: with 30 learners on two
cores that was 83 % of it. A learner is sent one answer at a time, so there are at most as many copies as learners, and nothing
rests on them (law 1): a shard still answers only those whose receives are posted, and with MPISGD_SSEND=1 there are no copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI


class Outbox:
    """Copies of bodies, each kept as it is until all to whom it is sent have it."""

    def __init__(self) -> None:
        self.newest: np.ndarray | None = None
        """The copy made last; what is sent of it is said by `keep` as soon as it has begun."""
        self._under_way: list[tuple[np.ndarray, list[MPI.Request]]] = []
        self._free: list[np.ndarray] = []

    def copy(self, body: np.ndarray) -> np.ndarray:
        """A copy to send from."""
        self._free = [copy for copy in self._free if copy.nbytes == body.nbytes]
        still = []
        for copy, requests in self._under_way:
            requests[:] = [request for request in requests if not request.Test()]
            if requests:
                still.append((copy, requests))
            elif copy.nbytes == body.nbytes:
                self._free.append(copy)
        self.newest = newest = self._free.pop() if self._free else np.empty_like(body)
        np.copyto(newest, body)
        self._under_way = [*still, (newest, [])]
        return newest

    def keep(self, requests: list[MPI.Request]) -> None:
        """The newest copy stays as it is until these, too, are done."""
        self._under_way[-1][1].extend(requests)

    def empty(self) -> None:
        """Wait until all have left."""
        for _, requests in self._under_way:
            for request in requests:
                request.Wait()
        self.newest = None
        self._under_way.clear()
