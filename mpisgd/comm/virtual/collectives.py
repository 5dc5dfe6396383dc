"""Virtual ranks that act together: collectives made of messages, and memory shared on a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Communicator, Part, Segment, Team
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Meeting, VirtualRank
from mpisgd.vectors.memory import copy_into


class Parts:
    """An exchange by parts; `own`: room for this rank's own."""

    def __init__(self, vector: Any, own: Any, parts: Sequence[Part]) -> None:
        self.vector = vector
        self.own = own
        self.parts = parts
        self.posted: list[Any] = []
        self.sent: list[Any] = []


class Shares:
    """An all-gather.

    Attributes:
        own: own parts still to be made.
        coming: parts not yet asked for, with their receives; none: own.
    """

    def __init__(self, mine: Any, start: int) -> None:
        self.mine = mine
        self.start = start
        self.own: list[Part] = []
        self.coming: dict[int, tuple[list[Any], slice]] = {}
        self.sent: list[Any] = []


class VirtualTeam(Team):
    """A team whose collectives cost as much as their messages.

    Headers go in rounds of doubling distance (Bruck et al. 1997): ceil(log2 places) latencies. Slices go directly, to the next
    place first: no link is first for all.

    Args:
        post: posts a receive of bodies, whatever the header.
    """

    def __init__(
        self,
        wire: Communicator,
        post: Callable[[int, int, tuple[Any, ...]], Any],
        ranks: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        cuts: Sequence[tuple[int, int]] = (),
    ) -> None:
        place = ranks.index(wire.rank)
        self._wire = wire
        self._post = post
        self._ranks = ranks
        self._bounds = bounds
        self._cuts = cuts or bounds
        self._place = place
        self._others = [(place + away) % len(ranks) for away in range(1, len(ranks))]

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        wire, ranks, place = self._wire, self._ranks, self._place
        known, away = [fields], 1  # known[i] is of the place i further on
        while away < len(ranks):
            posted = wire.post(ranks[(place + away) % len(ranks)], tag)
            sent = wire.start(ranks[place - away], tag, tuple(known[: len(ranks) - away]))
            known += wire.header(posted)
            wire.finish(sent)
            away *= 2
        return known[len(ranks) - place :] + known[: len(ranks) - place]

    def exchange(self, vector: Any, received: Any) -> None:
        slices, wire = [vector[start:end] for start, end in self._cuts], self._wire
        size = len(range(*self._cuts[self._place]))
        rows = [received[place * size : (place + 1) * size] for place in range(len(self._ranks))]
        copy_into(rows[self._place], slices[self._place])
        posted = [self._post(self._ranks[place], Tag.GRADIENT, (rows[place],)) for place in reversed(self._others)]
        sent = [wire.start(self._ranks[place], Tag.GRADIENT, (), slices[place]) for place in self._others]
        self._wait(posted, sent)

    def begin_parts(self, vector: Any, received: Any, parts: Sequence[Part]) -> Parts:
        """Post receives, last part first: messages of a backward pass meet receives in order."""
        size = len(range(*self._bounds[self._place]))
        rows = [received[place * size : (place + 1) * size] for place in range(len(self._ranks))]
        begun = Parts(vector, rows[self._place], parts)
        start, _ = self._bounds[self._place]
        for part in reversed(parts):
            if part.owner == self._place:
                for place in reversed(self._others):
                    room = rows[place][part.start - start : part.end - start]
                    begun.posted.append(self._post(self._ranks[place], Tag.GRADIENT, (room,)))
        return begun

    def leave(self, begun: Parts, number: int) -> None:
        part = begun.parts[number]
        body = begun.vector[part.start : part.end]
        if part.owner == self._place:
            start, _ = self._bounds[self._place]
            copy_into(begun.own[part.start - start : part.end - start], body)
        else:
            begun.sent.append(self._wire.start(self._ranks[part.owner], Tag.GRADIENT, (), body))

    def finish_parts(self, begun: Parts) -> None:
        self._wait(begun.posted, [])

    def see_out(self, begun: Parts) -> None:
        self._wait([], begun.sent)

    def share(self, own: Any, vector: Any) -> Shares:
        shared = self._shares(vector)
        copy_into(shared.mine, own)
        posted = [self._posted(place, vector[slice(*self._bounds[place])]) for place in reversed(self._others)]
        shared.coming[0] = posted, slice(None)
        self._send(shared, own)
        return shared

    def open_shares(self, vector: Any, parts: Sequence[Part]) -> Shares:
        shared = self._shares(vector)
        for number, part in enumerate(parts):
            room, posted = slice(part.start, part.end), []
            if part.owner == self._place:
                shared.own.append(part)
            else:
                posted = [self._posted(part.owner, vector[room])]
            shared.coming[number] = posted, room
        return shared

    def _shares(self, vector: Any) -> Shares:
        start, end = self._bounds[self._place]
        return Shares(vector[start:end], start)

    def _posted(self, place: int, room: Any) -> Any:
        return self._post(self._ranks[place], Tag.WEIGHTS, (room,))

    def _send(self, shared: Shares, own: Any) -> None:
        shared.sent += [self._wire.start(self._ranks[place], Tag.WEIGHTS, (), own) for place in self._others]

    def share_up_to(self, shared: Shares, own: Any, stop: int) -> None:
        """Let a part leave once all of it is made."""
        start = shared.start
        while shared.own and shared.own[0].end - start <= stop:
            part = shared.own.pop(0)
            mine = slice(part.start - start, part.end - start)
            copy_into(shared.mine[mine], own[mine])
            self._send(shared, own[mine])

    def arrive(self, shared: Shares, number: int, arrived: Callable[[slice], None] | None = None) -> None:
        if number not in shared.coming:
            return
        posted, part = shared.coming.pop(number)
        self._wait(posted, [])
        if arrived is not None:
            arrived(part)

    def finish(self, shared: Shares, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        """Wait for all: using a part takes no virtual time."""
        meanwhile()
        for number in list(shared.coming):
            self.arrive(shared, number, arrived)
        self._wait([], shared.sent)

    def _wait(self, posted: list[Any], sent: list[Any]) -> None:
        for each in posted:  # bodies follow headers, empty here
            self._wire.header(each)
        for transfer in (*posted, *sent):
            self._wire.finish(transfer)

    def disband(self) -> None:
        """Do nothing."""


class VirtualSegment(Segment):
    """Memory shared in no time."""

    def __init__(self, wire: VirtualRank, meeting: Meeting, maps: list[np.ndarray], place: int) -> None:
        self.place = place
        self.places = len(maps)
        self._wire = wire
        self._meeting = meeting
        self._maps = maps

    def bytes_of(self, place: int) -> np.ndarray:
        return self._maps[place]

    def meet(self) -> None:
        self._meeting.join(self._wire)

    def disband(self) -> None:
        """Do nothing: Python frees memory."""
