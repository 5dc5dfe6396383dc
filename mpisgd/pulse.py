"""Whether the shards still live, in a fault-tolerant run: MPI tells of a rank that died, but never of one that is stopped.

A learner that waits for a shard cannot tell one that hangs from one that waits for others, or writes for long. So it asks, on a
communicator of its own; a shard's thread answers, whatever its loop is doing, and only a process that does not run has none. Of a
shard that has not answered for as long as is patient, the one who asked says so, and ends the job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mpisgd import ulfm
from mpisgd.errors import EXIT_FAILED

if TYPE_CHECKING:
    from mpisgd.mpi import MPI

LEAST_S = 5.0
"""No silence is shorter: the threads of a busy machine take their time, too."""
TICK_S = 2.0
"""At most so many seconds count from one look to the next: this rank itself may have been stopped."""
TURN_S = 0.2
FORWARD_S = 0.5
_ASKS, _ANSWERS = 1, 2


class Waits(Protocol):
    """What tells that this rank waits (`tolerant.TolerantWire`)."""

    awaited: object
    patient: bool
    waits: int


class Pulse:
    """One rank's.

    Args:
        comm: used by nobody else.
        shard_ranks: who must answer.
        patience_s: how long they may be silent; `LEAST_S` at least.
        end: called with the rank that is silent, and for how many seconds it was; ends the job.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        waits: Waits,
        shard_ranks: Sequence[int],
        patience_s: float,
        end: Callable[[int, float], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm = comm
        self._waits = waits
        self._shard_ranks = shard_ranks
        self._patience_s = max(LEAST_S, patience_s)
        self._end = end
        self._now_s = now_s
        self._seen = -1
        self._looked_s = now_s()
        self._ask_s = 0.0
        self._silent_s = dict.fromkeys(shard_ranks, 0.0)
        self._under_way: list[tuple[Any, bytearray]] = []
        self._answers = comm.Get_rank() in shard_ranks

    def beat(self) -> None:
        """To be called every second or so, by a thread."""
        now_s = self._now_s()
        passed_s, self._looked_s = min(now_s - self._looked_s, TICK_S), now_s
        heard = self._hear()
        if self._answers:
            for rank in heard:
                self._send(rank, _ANSWERS)
            return
        waits = self._waits
        if (waits.awaited is None and not waits.patient) or waits.waits != self._seen:
            self._seen = waits.waits
            self._silent_s, self._ask_s = dict.fromkeys(self._shard_ranks, 0.0), now_s
            return
        for rank in self._shard_ranks:
            self._silent_s[rank] = 0.0 if rank in heard else self._silent_s[rank] + passed_s
            if self._silent_s[rank] > self._patience_s:
                self._end(rank, self._silent_s[rank])
        if now_s >= self._ask_s:
            self._ask_s = now_s + self._patience_s / 5
            for rank in self._shard_ranks:
                self._send(rank, _ASKS)

    def _hear(self) -> set[int]:
        """Who has asked, or answered. A message is a header without a body, so nothing that anybody sends is too long."""
        from mpisgd.mpi import MPI

        heard: set[int] = set()
        status = MPI.Status()
        try:
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                message.Recv(bytearray(status.Get_elements(MPI.BYTE)))
                heard.add(status.source)
        except MPI.Exception as error:
            self._learn(error)
        return heard

    def _send(self, rank: int, tag: int) -> None:
        from mpisgd.mpi import MPI

        try:
            self._under_way = [each for each in self._under_way if not each[0].Test()]
            body = bytearray(1)
            self._under_way.append((self._comm.Isend(body, rank, tag), body))
        except MPI.Exception as error:
            self._under_way.clear()
            self._learn(error)

    def _learn(self, error: MPI.Exception) -> None:
        """What becomes of the dead is known elsewhere."""
        if ulfm.is_failure(error):
            ulfm.failed(self._comm)
        elif not ulfm.is_revoked(error):
            raise error


def end(comm: MPI.Intracomm, text: str, before: Callable[[], None]) -> None:
    """End the job with this text, from a thread, unless another rank does; `before` this one goes, that is called."""
    time.sleep(min(TURN_S * comm.Get_rank(), 2.0))
    if comm.Is_revoked():
        return
    print(text, file=sys.stderr, flush=True)
    time.sleep(FORWARD_S)
    before()
    ulfm.end_job(comm, EXIT_FAILED)
