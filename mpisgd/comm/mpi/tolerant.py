"""Wire of a fault-tolerant run: a blocking call is a non-blocking call with a deadline (DESIGN 4, law 1).

Transfers of a dead rank (`ulfm.py`), or of a rank that hangs beyond patience, are given up; `take` says so before any message, as
LOST or STUCK from that rank. Shards are *vital*: a loss raises `RankLost`.

A *group*, a learner of several ranks, is lost with any of these. A rank that waits for another of its group raises Broken for a
loss anywhere in the group. Groups talk by messages: MPI's collectives may hang after a failure.

At the end ranks meet at the first; a barrier would wait for the dead.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.base.terminal import warn
from mpisgd.comm.communicator import Broken, Pattern
from mpisgd.comm.messages import LAYOUTS, MAGIC, NOBODY, Fields, Tag
from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.transfers import Receiving, Sending, nowhere, of_size
from mpisgd.comm.mpi.wire import HUB, Wire
from mpisgd.comm.politeness import SLEEP_LEAST_S, SLEEP_MOST_S, YIELD_S
from mpisgd.comm.presence import Losses
from mpisgd.comm.waiting import Meeting

_SPIN_S = 0.02
"""A transfer's close watch: sleeps between parts would be ruinous (TRAPS 4)."""
_SLEEP_S = 100e-6
_TOGETHER = 2
"""Requests awaited as one: a body's, and its question's."""
_NO_RANK = -1
_GROUP_LOOK_S = 0.02
"""Seconds between looks at the group."""

MEET_S = 60.0
"""Seconds to wait for a hanging rank where all meet, not in training."""
LEAST_MEET_S = 10.0
"""Least wait (`patience_s`) for a learner at the end, with nothing left to do."""


class NotForTheLoop(Exception):
    """A taken message that no loop may see."""


class RankLost(PeerError):
    """Death of a vital rank."""


class TolerantWire(Wire):
    """A rank's end of the wire, in a run that survives losses.

    Args:
        patience_s: how long a rank may hold up a transfer, unless vital.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        polite: bool,
        vital: Collection[int],
        describe: Callable[[int], str],
        patience_s: float,
    ) -> None:
        super().__init__(comm, polite=polite)
        self._vital = frozenset(vital)
        self._describe = describe
        self._patience_s = patience_s
        self.presence = self._losses = losses = Losses()
        self._lost = losses.dead
        self._partners = frozenset[int]()
        """Other ranks of the own group."""
        self._looked_s = 0.0
        self._kept: list[Any] = []
        """Given-up transfers: MPI may still write there, or read."""
        self._strays: Counter[int] = Counter()
        """Bodies given up before they began, by sender."""
        self._parting = False
        """Ranks may have left: MPI then calls them failed."""
        self._meetings = 0
        self._said: dict[int, np.ndarray] = {}
        """Words of ranks already at the end (`settle`)."""

    # ---------------------------------------------------------------------------------------------------------- failures

    def _learn(self, error: MPI.Exception) -> None:
        """Note failed ranks. Raises RankLost, or an error that is no failure."""
        if not ulfm.is_failure(error):
            raise error
        self._note_failed(error)

    def _note_failed(self, error: MPI.Exception | None = None) -> None:
        for rank in ulfm.failed(self._comm):
            if rank in self._vital and not self._parting:
                raise RankLost(f"rank {rank} ({self._describe(rank)}) is lost, and the job needs this rank") from error
            self._losses.died(rank)

    # ------------------------------------------------------------------------------------------------------------- group

    def group(self, ranks: Sequence[int]) -> Told:
        self._partners = frozenset(ranks) - {self.rank}
        return Told(self, ranks)

    def disband(self) -> None:
        self._partners = frozenset()

    def _is_broken(self) -> bool:
        """Return whether a rank of the group is lost. Raises RankLost, Revoked."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > _GROUP_LOOK_S:
            self._looked_s = now_s
            self._see_whether_all_is_over()
            self._note_failed()
        return not self._partners.isdisjoint(self._lost)

    # -------------------------------------------------------------------------------------------------------------- send

    def start(self, dest: int, tag: int, fields: Fields, *bodies: np.ndarray) -> Sending:
        if dest not in self._lost:
            try:
                return super().start(dest, tag, fields, *bodies)
            except MPI.Exception as error:
                self._learn(error)
        return Sending(dest, tag, False, [])

    def aside(self, body: np.ndarray) -> np.ndarray:
        """Return no copy: a hanging learner is known by bodies not taken."""
        return body

    def _add(self, opened: Sending, body: np.ndarray) -> None:
        if opened.dest not in self._lost:
            try:
                super()._add(opened, body)
            except MPI.Exception as error:
                self._learn(error)

    def finish(self, transfer: Sending | Receiving) -> bool:
        """Wait as `Wire`, or until the other end is lost (True), or too slow (False). Raises Broken."""
        self.waiting.awaited = transfer
        peer = transfer.peer
        until_s = time.perf_counter() + self._patience_with(peer)
        announced = isinstance(transfer, Sending) and transfer.announced
        chunked = isinstance(transfer, Receiving) and len(transfer.requests) > _TOGETHER
        done = True
        for at, request in enumerate(transfer.requests):
            try:
                done = self._until(request, peer, until_s, begins=chunked or (announced and at == 0))
            except MPI.Exception as error:
                raise of_size(error, transfer, "body") from None
            if not done:
                self._kept.append(transfer)
                break
            if isinstance(transfer, Receiving) and at < len(transfer.rooms):
                transfer.check(at, self._status.Get_elements(MPI.BYTE))
        self.waiting.goes_on()
        if isinstance(transfer, Sending) and peer in self._partners & self._lost:
            raise Broken
        return done or peer in self._lost

    def _patience_with(self, peer: int) -> float:
        return math.inf if peer in self._vital or peer in self._partners else self._patience_s

    def _until(self, request: MPI.Request, peer: int, until_s: float = math.inf, *, begins: bool = False) -> bool:
        """Wait; return whether done in time. `begins`: a transfer yet to begin is awaited politely."""
        start_s = now_s = time.perf_counter()
        spin_s, pause_s = (YIELD_S, SLEEP_LEAST_S) if begins and self.polite else (_SPIN_S, _SLEEP_S)
        most_s = SLEEP_MOST_S if begins else _SLEEP_S
        while True:
            try:
                if request.Test(self._status):
                    return True
                self._see_whether_all_is_over()
                if peer in self._partners and self._is_broken():
                    raise Broken
            except MPI.Exception as error:
                self._learn(error)
                return False
            if peer in self._lost:
                return False
            if now_s > until_s:
                self._losses.news.append((peer, Tag.STUCK))
                return False
            now_s = time.perf_counter()
            if now_s - start_s > spin_s:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, most_s)
            elif self.polite:
                os.sched_yield()

    def _see_whether_all_is_over(self) -> None:
        """Raise Revoked if another rank ended the job: MPI leaves earlier requests pending."""
        if self._comm.Is_revoked():
            raise ulfm.Revoked

    # ----------------------------------------------------------------------------------------------------------- receive

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Tell of losses first. Raises RankLost, Broken."""
        if patterns[0][0] in self._partners:
            return self._take_in_group(patterns)
        while not self._losses.news:
            try:
                return super().take(patterns, until_ns, coming)
            except NotForTheLoop:
                continue
            except MPI.Exception as error:
                self._learn(error)
        return self._tell()

    def _take_in_group(self, patterns: tuple[Pattern, ...]) -> tuple[int, int, Fields]:
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

    def _header(self, source: int, tag: int, nbytes: int, message: MPI.Message) -> tuple[int, int, Fields]:
        """Raise NotForTheLoop for messages of the dead, too late, or of the end."""
        stray = tag not in LAYOUTS and self._strays[source] > 0
        if tag == Tag.HERE and self.rank == HUB:  # already at the end, which begins with `meet`
            self._hear_early(source, nbytes, message)
        elif stray or source in self._lost:
            self._strays[source] -= stray
            self._throw_away(source, nbytes, message)
        else:
            return super()._header(source, tag, nbytes, message)
        raise NotForTheLoop

    def _hear_early(self, source: int, nbytes: int, message: MPI.Message) -> None:
        try:
            word = self._word(source, self._meetings + 1, 1, nbytes, message)
        except PeerError:
            if source in self._losses.away():  # of a meeting that went on without this rank
                return
            raise
        if source in self._said:
            raise PeerError(f"rank {source} is at the end twice", source)
        self._said[source] = word

    def _arrived(self, request: MPI.Request) -> bool:
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self._learn(error)
            return False

    def _tell(self) -> tuple[int, int, Fields]:
        rank, tag = self._losses.news.popleft()
        return rank, tag, (NOBODY,)

    def header_or_signal(self, posted: Receiving) -> None:
        self.waiting.awaited, self.waiting.patient = posted, True
        request = posted.requests[0]
        while not (self.signal > 0 or self._arrived(request)):
            self._see_whether_all_is_over()
            time.sleep(SLEEP_MOST_S)
        self.waiting.goes_on()

    def take_body(self, *bodies: np.ndarray) -> bool:
        """Return False if the sender was lost or too slow: MPI may still write to the bodies. Raises Broken."""
        source, layout = self._taken
        until_s = time.perf_counter() + self._patience_with(source)
        whole = all(self._take_one(source, layout.body, body, until_s) for body in bodies)
        if not whole and source in self._partners:
            raise Broken
        return whole

    def _take_one(self, source: int, tag: int, body: np.ndarray, until_s: float) -> bool:
        probed = self._probe_body(source, tag, until_s)
        if probed is None:
            return False
        *_, nbytes, message = probed
        self._check_size(source, tag, nbytes, message, body.nbytes)
        request = message.Irecv(body)
        if not self._until(request, source, until_s):
            self._kept.append((request, body))
            return False
        return True

    def _probe_body(self, source: int, tag: int, until_s: float) -> tuple[int, int, int, MPI.Message] | None:
        while source not in self._lost:
            try:
                if (probed := self._arrivals.body(source, tag, until_s)) is not None:
                    return probed
            except MPI.Exception as error:
                self._learn(error)
                continue
            self._losses.news.append((source, Tag.STUCK))
            self._strays[source] += 1
            return None
        return None

    def _throw_away(self, source: int, nbytes: int, message: MPI.Message) -> None:
        """Drop a message without waiting for a sender that may hang."""
        buffer = nowhere(nbytes)
        request = message.Irecv(buffer)
        if not self._arrived(request):
            self._kept.append((request, buffer))

    def _wait(self, request: MPI.Request) -> None:
        """Wait for a request that no losable rank can hold up."""
        self._until(request, _NO_RANK, begins=True)

    # ----------------------------------------------------------------------------------------------------------- the end

    def meet(self) -> None:
        nothing = np.zeros(1, np.int64)
        self.settle(nothing, lambda _: nothing, 1)

    def settle(self, said: np.ndarray, decide: Callable[[np.ndarray], np.ndarray], size: int, busy_s: float = 0.0) -> np.ndarray:
        """Settle at the hub, once all awaited ranks are there; lost ranks say zeros, ranks left out hear zeros."""
        self._meetings += 1
        if self.rank != HUB:
            self.waiting.awaited = Meeting(HUB)
            decided = np.zeros(size, np.int64)
            try:
                answered = self._comm.Irecv(decided, HUB, Tag.MET)
                sent = self._comm.Issend(np.concatenate([[MAGIC, self._meetings], said]), HUB, Tag.HERE)
            except MPI.Exception as error:  # the others have met, and are gone
                self._learn(error)
                self.waiting.goes_on()
                return decided
            self._wait(sent)
            self._wait(answered)
            self.waiting.goes_on()
            return decided
        table = np.zeros((self._comm.Get_size(), len(said)), np.int64)
        table[HUB] = said
        heard = self._hear(table, busy_s)
        decided = decide(table)
        answers = {}
        for rank in heard:
            try:
                answers[rank] = self._comm.Issend(decided, rank, Tag.MET)
            except MPI.Exception as error:  # came, and died since
                self._learn(error)
        start_s = time.perf_counter()
        for rank, answered in answers.items():
            self._wait_to_meet({rank})
            if not self._until(answered, rank, start_s + self._meets_s(rank)):
                self._kept.append((answered, decided))
                self._losses.give_up(rank)
        self.waiting.goes_on()
        return decided

    def _hear(self, table: np.ndarray, busy_s: float) -> list[int]:
        coming = {
            rank
            for rank in range(len(table))
            if rank not in self._lost and rank not in self._losses.hanging and rank not in self._said and rank != HUB
        }
        heard: list[int] = []
        for rank, said in self._said.items():
            table[rank] = said
            heard.append(rank)
        self._said.clear()
        start_s = time.perf_counter() + busy_s
        sleep_s = _SLEEP_S
        while coming:
            self._see_whether_all_is_over()
            self._wait_to_meet(coming)
            for rank in sorted(coming):
                if self._has_come(rank, table):
                    heard.append(rank)
                elif rank not in self._lost and time.perf_counter() < start_s + self._meets_s(rank):
                    continue
                else:
                    self._losses.give_up(rank)
                coming.discard(rank)
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, 2e-3)
        return heard

    def _wait_to_meet(self, ranks: Collection[int]) -> None:
        """Let the heartbeat listen to a rank without which there is no job; any other is given up (`_meets_s`)."""
        vital = min(self._vital.intersection(ranks), default=None)
        self.waiting.awaited = None if vital is None or self._parting else Meeting(vital)

    def _meets_s(self, rank: int) -> float:
        """Return seconds to wait in this meeting; the first is the start."""
        if rank in self._vital:
            return MEET_S if self._parting else math.inf
        return MEET_S if self._meetings == 1 else min(MEET_S, max(self._patience_s, LEAST_MEET_S))

    def _has_come(self, rank: int, table: np.ndarray) -> bool:
        """Return whether a rank is here, its word then in the table. Warn of an invalid word."""
        try:
            message = self._comm.Improbe(rank, Tag.HERE, self._status)
            if message is not None:
                table[rank] = self._word(rank, self._meetings, table.shape[1], self._status.Get_elements(MPI.BYTE), message)
        except MPI.Exception as error:
            self._learn(error)
            return False
        except PeerError as error:
            warn(f"mpisgd: a message was refused: {error}")
            return False
        return message is not None

    def _word(self, source: int, meeting: int, size: int, nbytes: int, message: MPI.Message) -> np.ndarray:
        self._check_size(source, Tag.HERE, nbytes, message, 8 * (2 + size))
        word = np.zeros(2 + size, np.int64)
        message.Recv(word)
        if word[0] != MAGIC or word[1] != meeting:
            raise PeerError(
                f"rank {source} is at meeting {word[1]} with magic {word[0]:#x}: expected {meeting}, {MAGIC:#x}", source
            )
        return word[2:]

    def part(self) -> None:
        """Part; the hub learns that all who still hear it know the end."""
        self._parting = True
        try:
            self.meet()
        except MPI.Exception as error:
            self._learn(error)


class Told:
    """A `Group` by messages."""

    def __init__(self, wire: TolerantWire, ranks: Sequence[int]) -> None:
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
