"""MPI's queue of arrived messages, searched as politely as the rank waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Pattern
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.transfers import BODY_S, IncomingBodies, name_of_tag
from mpisgd.comm.politeness import BODY_SLEEP_S, SLEEP_MOST_S, Politeness


class Arrivals:
    """The queue of a rank; `polite`: leave the core to others in waits."""

    def __init__(self, comm: MPI.Intracomm, politeness: Politeness, *, polite: bool) -> None:
        self._comm = comm
        self._politely = politeness.until
        self.polite = polite
        self._status = MPI.Status()
        self._wanted: dict[tuple[Pattern, ...], list[tuple[int, int]]] = {}

    def probe(self, patterns: tuple[Pattern, ...]) -> tuple[int, int, int, MPI.Message]:
        """Take a message out of MPI's queue, not yet received: (source, tag, bytes, message)."""
        wanted = self._wanted_of(patterns)
        if len(wanted) == 1 and not self.polite:
            status = self._status
            message = self._comm.Mprobe(*wanted[0], status)
            return status.source, status.tag, status.Get_elements(MPI.BYTE), message  # Get_count ends at 2 GiB
        probed = self.until(patterns, never)
        assert probed is not None
        return probed

    def until(
        self, patterns: tuple[Pattern, ...], over: Callable[[], bool], most_s: float = SLEEP_MOST_S
    ) -> tuple[int, int, int, MPI.Message] | None:
        """Probe with sleeps of at most `most_s`; return None if `over` first.

        Looks at least twice: Open MPI's Improbe takes in new messages only after its search.
        """
        wanted, status, improbe = self._wanted_of(patterns), self._status, self._comm.Improbe

        def look() -> MPI.Message | None:
            for source, tag in wanted:
                if (message := improbe(source, tag, status)) is not None:
                    return message
            return None

        def ready() -> MPI.Message | Literal[False] | None:
            message = look()
            return False if message is None and over() else message

        message: MPI.Message | Literal[False] | None = look()
        if message is None and self.polite:
            message = self._politely(ready, most_s)
        while message is None:
            message = ready()
        return (status.source, status.tag, status.Get_elements(MPI.BYTE), message) if message else None

    def beside(
        self, patterns: tuple[Pattern, ...], coming: Sequence[IncomingBodies], over: Callable[[], bool]
    ) -> tuple[int, int, int, MPI.Message] | None:
        """Probe as `until`, and receive `coming` bodies once MPI has seen them.

        Return None if any is whole, or stands still for `BODY_S`.
        """
        until_s = time.perf_counter() + BODY_S
        for each in coming:
            each.until_s = until_s

        def ended() -> bool:
            self._begin_awaited(coming)
            return any([each.is_whole() for each in coming]) or over()  # asks all

        while True:
            probed = self.until(patterns, ended, BODY_SLEEP_S)
            if probed is None:
                return None
            source, tag, nbytes, message = probed
            body = next((each for each in coming if each.is_awaited_of(source)), None)
            if body is not None and tag == body.tag:
                body.begin(nbytes, message)
                continue
            if body is not None and (None, tag) not in patterns:  # messages of a rank keep their order, unless asked for by tag
                body.miss(tag)
            return probed

    def _begin_awaited(self, coming: Sequence[IncomingBodies]) -> None:
        status = self._status
        looked: set[int] = set()
        for each in coming:
            while each.is_awaited_of(each.source) and each.source not in looked:
                message = self._comm.Improbe(each.source, each.tag, status)
                if message is None:
                    looked.add(each.source)
                else:
                    each.begin(status.Get_elements(MPI.BYTE), message)

    def _wanted_of(self, patterns: tuple[Pattern, ...]) -> list[tuple[int, int]]:
        wanted = self._wanted.get(patterns)
        if wanted is None:
            wanted = [(MPI.ANY_SOURCE if s is None else s, MPI.ANY_TAG if t is None else t) for s, t in patterns]
            self._wanted[patterns] = wanted
        return wanted

    def body(self, source: int, tag: int, until_s: float) -> tuple[int, int, int, MPI.Message] | None:
        """Take an announced body out of MPI's queue; return None if nothing comes by `until_s`.

        Raises PeerError: another message came instead.
        """
        status, iprobe = self._status, self._comm.Iprobe

        def ready() -> bool | None:
            if iprobe(source, MPI.ANY_TAG, status):
                return True
            return False if time.perf_counter() > until_s else None

        if not self._politely(ready):
            return None
        found = status.Get_tag()
        if found != tag:
            raise PeerError(f"rank {source} sent a header without {name_of_tag(tag)}: {name_of_tag(found)} came", source)
        while (message := self._comm.Improbe(source, tag, status)) is None:
            pass  # Iprobe has seen it
        return source, tag, status.Get_elements(MPI.BYTE), message


def never() -> bool:
    return False
