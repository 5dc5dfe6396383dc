"""The wire of a fault-tolerant run whose learners are groups of ranks: none of a group can do anything without the others.

A rank that waits for another of its group asks MPI, now and then, whether any of the group has failed, for it may wait for one that
lives, and waits itself. Then it raises Broken; so do all others of the group, each when it comes to wait for one of them. Waits for
shards end as ever: so a push, or a pull, is whole when a rank leaves.

A rank of the group that hangs is waited for as long as it lives; the shards miss their learner meanwhile, and come to their end.
What ranks of a group tell each other are messages, not collectives of MPI's, which may hang where one of them has failed.
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
"""Seconds from one question to the next whether all of the group live."""


class GroupedWire(TolerantWire):
    """A rank's end of the wire; of one that is in no group, as any other of a fault-tolerant run."""

    def __init__(self, comm: MPI.Intracomm, **named: Any) -> None:
        super().__init__(comm, **named)
        self._partners = frozenset[int]()
        """The others."""
        self._looked_s = 0.0

    def group(self, ranks: Sequence[int]) -> Told:
        """From now on this rank is nothing without these."""
        self._partners = frozenset(ranks) - {self.rank}
        return Told(self, ranks)

    def disband(self) -> None:
        """Whatever becomes of the others is nothing to this rank any more."""
        self._partners = frozenset()

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Take as any rank does. Raises Broken where this is waited for from a rank of the group, and any of it is lost."""
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
        """Take bodies as any rank does. Raises Broken where they are of a rank of the group, and do not come."""
        source, _ = self._taken
        whole = super().take_body(*bodies)
        if not whole and source in self._partners:
            raise Broken
        return whole

    def finish(self, transfer: Sending | Receiving) -> bool:
        """Wait as any rank does. Raises Broken where the other end is of the group, and any of it is lost."""
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
        """Whether any of the group is lost. Raises RankLost, as `take`; and where another rank has ended the job."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._see_whether_all_is_over()
            self._note_failed()
        return not self._partners.isdisjoint(self._lost)


class Told:
    """A group's words, as messages: each rank sends its own to all others, and takes theirs in the order of places."""

    def __init__(self, wire: GroupedWire, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._ranks = ranks

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """All-gather of headers. Raises Broken."""
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
