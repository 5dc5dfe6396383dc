"""Wire of a fault-tolerant run with groups of ranks as learners: a rank can do nothing without its group.

A rank that waits for another of its group asks MPI now and then for failures in the group: the awaited rank may live, and wait
itself. It then raises Broken; the others do so at their next wait in the group. A hanging rank is waited for as long as it lives;
shards miss the learner, and end.

Groups talk by messages: MPI's collectives may hang after a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Broken, Pattern
from mpisgd.comm.messages import Fields
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.tolerant import NotForTheLoop, TolerantWire
from mpisgd.comm.mpi.transfers import Receiving, Sending

LOOK_S = 0.02
"""Seconds between looks at the group."""


class GroupedWire(TolerantWire):
    def __init__(self, comm: MPI.Intracomm, **named: Any) -> None:
        super().__init__(comm, **named)
        self._partners = frozenset[int]()
        self._looked_s = 0.0

    def group(self, ranks: Sequence[int]) -> Told:
        self._partners = frozenset(ranks) - {self.rank}
        return Told(self, ranks)

    def disband(self) -> None:
        self._partners = frozenset()

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        source, _ = patterns[0]
        if source not in self._partners:
            return super().take(patterns, until_ns, coming)
        while self._partners.isdisjoint(self._lost):
            self.waiting.awaited = patterns
            try:
                probed = self._arrivals.until(patterns, self._is_broken)
                self.waiting.goes_on()
                if probed is not None:
                    return self._header(*probed)
            except NotForTheLoop:
                continue
            except MPI.Exception as error:
                self._learn(error)
        raise Broken

    def take_body(self, *bodies: np.ndarray) -> bool:
        source, _ = self._taken
        whole = super().take_body(*bodies)
        if not whole and source in self._partners:
            raise Broken
        return whole

    def finish(self, transfer: Sending | Receiving) -> bool:
        done = super().finish(transfer)
        if isinstance(transfer, Sending) and transfer.dest in self._partners & self._lost:
            raise Broken
        return done

    def _patience_with(self, peer: int) -> float:
        return math.inf if peer in self._partners else super()._patience_with(peer)

    def _see_who_is_left(self, peer: int) -> None:
        if peer in self._partners and self._is_broken():
            raise Broken

    def _is_broken(self) -> bool:
        """Return whether a rank of the group is lost. Raises RankLost, Revoked."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._see_whether_all_is_over()
            self._note_failed()
        return not self._partners.isdisjoint(self._lost)


class Told:
    """A `Group` by messages."""

    def __init__(self, wire: GroupedWire, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._ranks = ranks

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        wire, own = self._wire, self._wire.rank
        sent = [wire.start(rank, tag, fields) for rank in self._ranks if rank != own]
        told = []
        for rank in self._ranks:
            taken = (own, tag, fields) if rank == own else wire.take(((rank, tag),))
            assert taken is not None
            told.append(taken[2])
        for each in sent:
            wire.finish(each)
        return told

    def disband(self) -> None:
        self._wire.disband()
