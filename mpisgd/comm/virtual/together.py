"""Virtual ranks that act together: collectives made of messages, and memory that ranks of one node share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Communicator, Node, Part, Team
from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Meeting, VirtualRank
from mpisgd.vectors.memory import copy_into


class Parts:
    """An exchange whose parts leave one by one; `own`: where this rank's own go."""

    def __init__(self, vector: Any, own: Any, parts: Sequence[Part]) -> None:
        self.vector = vector
        self.own = own
        self.parts = parts
        self.posted: list[Any] = []
        self.sent: list[Any] = []


class Shares:
    """An all-gather of slices that are being made, part by part.

    Args:
        mine: this rank's slice of the gathered vector, which begins at element `start`.

    Attributes:
        own: its parts that are still to be made.
        coming: by number, all that were not yet asked for, each with what it waits for; None: this rank's own.
    """

    def __init__(self, mine: Any, start: int) -> None:
        self.mine = mine
        self.start = start
        self.own: list[Part] = []
        self.coming: dict[int, tuple[Any, slice]] = {}
        self.sent: list[Any] = []


class VirtualTeam(Team):
    """Ranks that act together, by the messages that MPI's collectives are made of: so these cost what messages cost.

    Headers are gathered in rounds, over twice the distance each (Bruck et al. 1997): ceil(log2 places) latencies. Slices, which
    are large, go from each rank to each other one directly, to the next place first, so that no link is everybody's first.

    Args:
        post: posts the receive of a message of which only the bodies mean something, from a rank.
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
        known, away = [fields], 1  # known[i] is of the place that is i further on
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
        """Messages of one sender meet its receives in their order: that of a backward pass, the last part first."""
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

    def share(self, own: Any, vector: Any) -> tuple[list[Any], list[Any]]:
        wire = self._wire
        copy_into(self._slice(vector, self._place), own)
        posted = self._posted(vector)
        return posted, [wire.start(self._ranks[place], Tag.WEIGHTS, (), own) for place in self._others]

    def open_shares(self, vector: Any, parts: Sequence[Part]) -> Shares:
        start, _ = self._bounds[self._place]
        shared = Shares(self._slice(vector, self._place), start)
        for number, part in enumerate(parts):
            room, posted = slice(part.start, part.end), None
            if part.owner == self._place:
                shared.own.append(part)
            else:
                posted = self._post(self._ranks[part.owner], Tag.WEIGHTS, (vector[room],))
            shared.coming[number] = posted, room
        return shared

    def share_up_to(self, shared: Shares, own: Any, stop: int) -> None:
        """In virtual time a part leaves when all of it is made."""
        start = shared.start
        while shared.own and shared.own[0].end - start <= stop:
            part = shared.own.pop(0)
            mine = slice(part.start - start, part.end - start)
            copy_into(shared.mine[mine], own[mine])
            shared.sent.extend(self._wire.start(self._ranks[place], Tag.WEIGHTS, (), own[mine]) for place in self._others)

    def arrive(self, shared: Shares, number: int, arrived: Callable[[slice], None] | None = None) -> None:
        if number not in shared.coming:
            return
        posted, part = shared.coming.pop(number)
        if posted is not None:
            self._wait([posted], [])
        if arrived is not None:
            arrived(part)

    def _posted(self, vector: Any) -> list[Any]:
        return [self._post(self._ranks[place], Tag.WEIGHTS, (self._slice(vector, place),)) for place in reversed(self._others)]

    def finish(
        self,
        shared: tuple[list[Any], list[Any]] | Shares,
        meanwhile: Callable[[], None],
        arrived: Callable[[slice], None] | None = None,
    ) -> None:
        """In virtual time to go on with a part costs nothing."""
        meanwhile()
        if isinstance(shared, Shares):
            for number in list(shared.coming):
                self.arrive(shared, number, arrived)
            self._wait([], shared.sent)
            return
        self._wait(*shared)
        if arrived is not None:
            arrived(slice(None))

    def _wait(self, posted: list[Any], sent: list[Any]) -> None:
        for each in posted:  # bodies come after headers, though these say nothing here
            self._wire.header(each)
        for transfer in (*posted, *sent):
            self._wire.finish(transfer)

    def disband(self) -> None:
        """Nothing is held."""

    def _slice(self, vector: Any, place: int) -> Any:
        start, end = self._bounds[place]
        return vector[start:end]


class Memory:
    """Memory that ranks of one node have in common."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.pieces: list[list[np.ndarray]] = []


class VirtualNode(Node):
    """Ranks that share memory. That takes no time of its own: who reads or writes much says so on its own clock."""

    def __init__(self, wire: VirtualRank, memory: Memory, ranks: Sequence[int]) -> None:
        self.place: int = ranks.index(wire.rank)
        self.places: int = len(ranks)
        self._wire = wire
        self._memory = memory
        self._asked = 0

    def vectors(self, count: int, size: int) -> list[Any]:
        return self._piece(count, size, "float32")

    def words(self, count: int) -> Any:
        return self._piece(1, count, "float64")[0]

    def _piece(self, count: int, size: int, kind: str) -> list[Any]:
        """The next piece of memory, which the first rank that asks for it makes."""
        pieces = self._memory.pieces
        if self._asked == len(pieces):
            pieces.append([np.zeros(size, kind) for _ in range(count)])
        self._asked += 1
        return pieces[self._asked - 1]

    def meet(self) -> None:
        self._memory.meeting.join(self._wire)

    def disband(self) -> None:
        """Python keeps the memory as long as anybody looks at it."""
