"""A look for ranks that hang: MPI reports deaths at best, never a stopped rank or a dead link.

The watch of each rank asks and answers, whatever the loop does. Silent are stopped processes, dead networks, and code that keeps
Python's global lock. Two forms of a run:

fail-fast       all ask the hub, which listens to all; silence beyond patience ends the job, on both sides of a cut link.
fault-tolerant  a waiting learner asks the shards, of which none may hang; shards ask only ranks that all wait for
                (`serving/fault_tolerant.py`), and a shard that holds up their own message. During the start: as fail-fast.

Without MPI_THREAD_MULTIPLE there is no heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpisgd.base.errors import EXIT_FAILED
from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.node_processes import NodeProcesses, start_s, unless_dumping, within
from mpisgd.comm.presence import Presence
from mpisgd.comm.waiting import Waiting
from mpisgd.liveness.guard import abort, speak
from mpisgd.liveness.ranks import Ranks, place_to_speak
from mpisgd.liveness.watch import Look

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

HUB = 0
LEAST_S = 5.0
"""Least silence that counts: threads of a busy machine are slow."""
TICK_S = 2.0
"""Most seconds that count between looks: this rank, or the job, may have been stopped."""
TURN_S = 1.0
LAUNCHER_S = 15.0
_DRAIN_LOOK_S = 0.002
_ASKS, _ANSWERS, _LAST = 1, 2, 3


class Heartbeat(Look):
    """Heartbeat of a rank.

    Args:
        patience_s: longest silence of a rank, at least `LEAST_S`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        patience_s: float,
        way_on: Callable[[], str],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._job = self._comm = comm
        self._rank, size = comm.Get_rank(), comm.Get_size()
        self._patience_s = max(LEAST_S, patience_s)
        self._period_s = self._patience_s / 10
        self._way_on = way_on
        self._now_s = now_s
        self._name: Callable[[int], str] = "rank {}".format
        self._ranks: Ranks | None = None
        self._asks: Sequence[int] = () if self._rank == HUB else (HUB,)
        self._heeds: Sequence[int] = [rank for rank in range(size) if rank != HUB] if self._rank == HUB else (HUB,)
        self._vital: frozenset[int] = frozenset()
        self._waiting: Waiting | None = None
        self._presence: Presence | None = None
        """On a fault-tolerant shard: watched and silent ranks."""
        self._seen = -1
        self._looked_s = now_s()
        self._ask_s = self._looked_s + self._period_s * self._rank / size
        """When to ask again, staggered by rank."""
        self._lived_s = 0.0
        """Seconds that this rank saw pass."""
        self._heard_s = dict.fromkeys(self._heeds, 0.0)
        """Second of `_lived_s` at which each was heard."""
        self._under_way: list[tuple[Any, bytearray]] = []
        self._parted: set[int] = set()
        self._lock = threading.Lock()
        self.beats = False
        """A hanging rank is noticed."""

    # ------------------------------------------------------------------------------------------------------- while it beats

    def begin(self) -> bool:
        from mpisgd.comm.mpi.library import MPI

        if self._job.Get_size() > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            # All wait for all here, as in MPI_Init, and no heartbeat beats yet.
            with within(unless_dumping(start_s())):
                self._comm = self._job.Dup()
            self.beats = True
        return self.beats

    def know(self, ranks: Ranks, name: Callable[[int], str]) -> None:
        self._ranks, self._name = ranks, name

    def tolerate(self, shard_ranks: Sequence[int], waiting: Waiting, presence: Presence) -> None:
        """Let shards ask ranks that their loops watch or wait for, others the shards."""
        with self._lock:
            self._waiting = waiting
            if self._rank in shard_ranks:
                self._vital = frozenset(shard_ranks)
                self._asks, self._presence = (), presence
                self._heard_s.clear()
            else:
                self._asks = self._heeds = shard_ranks

    def drain(self) -> None:
        """Leave nothing under way on a freed communicator, on all ranks, at their end: its number may come again.

        If a link just failed, waits end after `patience_s`, and the communicator is kept. With ULFM processes leave untidied.
        """
        if not self.beats or ulfm.enabled():
            return
        others = range(1, self._comm.Get_size()) if self._rank == HUB else (HUB,)
        if self._rank != HUB:
            self._send(HUB, _LAST)
        until_s = self._now_s() + self._patience_s
        while not self._parted.issuperset(others) and self._now_s() < until_s:
            self._hear()
            time.sleep(_DRAIN_LOOK_S)
        for rank in others if self._rank == HUB else ():
            self._send(rank, _LAST)
        if self._parted.issuperset(others):
            for request, _ in self._under_way:
                request.Wait()
            self._comm.Free()

    # ----------------------------------------------------------------------------------------------------------- the rules

    def look(self) -> None:
        """Hear, answer, ask, and end the job over silence; call every second or so."""
        with self._lock:
            now_s = self._now_s()
            self._lived_s += min(now_s - self._looked_s, TICK_S)
            self._looked_s = now_s
            self._hear()
            blocking = self._blocking()
            if self._presence is not None:
                self._turn_to(self._presence.watched | blocking)
            if not self._listens():
                self._heard_s, self._ask_s = dict.fromkeys(self._heeds, self._lived_s), now_s
                return
            silent_s = {rank: self._lived_s - self._heard_s.get(rank, 0.0) for rank in self._heeds}
            # A rank asked just before it was stopped is silent a little longer than it was stopped.
            most_s = self._patience_s + self._period_s + TICK_S
            if self._presence is not None:
                self._presence.unheard = frozenset(rank for rank, each in silent_s.items() if each > most_s)
                silent_s = {rank: silent_s[rank] for rank in blocking}
            if silent_s and max(silent_s.values()) > most_s:
                self.end({rank: each for rank, each in silent_s.items() if each > self._patience_s / 2})
            if now_s >= self._ask_s:
                self._ask_s = now_s + self._period_s
                for rank in self._asks:
                    self._send(rank, _ASKS)

    def _turn_to(self, watched: frozenset[int]) -> None:
        self._heard_s |= dict.fromkeys(watched.difference(self._asks), self._lived_s)
        self._asks = self._heeds = sorted(watched)

    def _blocking(self) -> frozenset[int]:
        """Return the shard, if any, that holds up a message of this shard in a fault-tolerant run."""
        return self._vital if self._waiting is None else self._vital.intersection([self._waiting.peer])

    def _listens(self) -> bool:
        """Return whether silence counts: shards', in a fault-tolerant run, only during the same wait of this rank."""
        waiting = self._waiting
        if waiting is None or self._presence is not None:
            return True
        seen, self._seen = self._seen, waiting.waits
        return seen == self._seen and waiting.awaited is not None

    def _hear(self) -> None:
        from mpisgd.comm.mpi.library import MPI

        status = MPI.Status()
        try:
            self._under_way = [each for each in self._under_way if not each[0].Test()]
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                message.Recv(bytearray(status.Get_elements(MPI.BYTE)))  # of any size: no message is too long
                self._note(status)
                if status.tag == _ASKS:
                    self._send(status.source, _ANSWERS)
        except MPI.Exception as error:
            self._under_way.clear()
            self._learn(error)

    def _note(self, status: MPI.Status) -> None:
        if status.tag != _ASKS or status.source not in self._asks:  # a question tells nothing of the way to its sender
            self._heard_s[status.source] = self._lived_s
        if status.tag == _LAST:  # the hub may still beat
            self._parted.add(status.source)

    def _send(self, rank: int, tag: int) -> None:
        from mpisgd.comm.mpi.library import MPI

        try:
            body = bytearray(1)
            self._under_way.append((self._comm.Isend(body, rank, tag), body))
        except MPI.Exception as error:
            self._learn(error)

    def _learn(self, error: MPI.Exception) -> None:
        if ulfm.is_failure(error):
            ulfm.failed(self._comm)
        elif not ulfm.is_revoked(error):
            raise error

    # ------------------------------------------------------------------------------------------------------------- the end

    def end(self, silent_s: dict[int, float]) -> None:
        """End the job over silent ranks, unless another rank does."""
        hosts = self._ranks.hosts if self._ranks is not None else ["unknown"] * self._job.Get_size()
        place = 0 if self._rank == HUB else place_to_speak(self._rank, hosts, silent_s)
        if self.over.wait(ulfm.turn_s(place, TURN_S)) or (ulfm.enabled() and self._job.Is_revoked()):
            return
        ranks = sorted(silent_s, key=lambda rank: -silent_s[rank])
        who = ", ".join(map(self._name, ranks[:3])) + f" and {len(ranks) - 3} more" * (len(ranks) > 3)
        patient = f"longer than faults.patience_s = {self._patience_s:g}"
        why = "a stopped process, no network to the rank, or code that lets no other thread run"
        text = f"mpisgd: {self._name(self._rank)} has heard nothing of {who} for {silent_s[ranks[0]]:.0f} s, {patient}: {why}"
        speak(f"{text}; the job is ended", self._way_on)
        node_processes = NodeProcesses()
        node_processes.end_launcher_within(LAUNCHER_S)
        if not ulfm.enabled():
            abort(self._job, EXIT_FAILED)
        if self._ranks is not None:
            self._ranks.end(ranks)
            if any(self._ranks.hosts[rank] != self._ranks.hosts[self._rank] for rank in ranks):
                node_processes.end_job()
        ulfm.end_job(self._job, EXIT_FAILED)
