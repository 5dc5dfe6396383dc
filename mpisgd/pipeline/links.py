"""The calls of a partition, as messages between the ranks of a group (`models/partition.py`).

No deadlock, and nothing rests on buffers: in each call a rank begins to send all that it gives, takes what the others give, in the
order of pieces, and then waits until what it sent was taken. Those it gives to are those it takes from. So a rank in its n-th call
waits for others that come to their n-th call: the one that is behind all others always goes on. Messages of one rank to another
come in the order of calls; their headers say which call they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import Tag
from mpisgd.vectors.computing import Waited


class Carrier(Protocol):
    """What parts are: tensors, or, in virtual time, sizes."""

    def describe(self, part: Any) -> tuple[tuple[int, ...], Any]:
        """What a part is for the header, and its bytes, or None."""

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        """Memory for a part that the other end described so, and its bytes, or None."""


_ALIKE = "all pieces of a model make the same calls in the same order"


class WireLinks:
    """A rank's `Links`, of mini-batch `seq` and its micro-batch `micro`.

    Args:
        ranks: of the group, in the order of pieces; `wire` is that of one of them.

    Attributes:
        waited: for the others, in all calls.
    """

    def __init__(self, wire: Communicator, ranks: Sequence[int], carrier: Carrier, waited: Waited) -> None:
        self.seq = self.micro = 0
        self._wire = wire
        self._ranks = ranks
        self._place = ranks.index(wire.rank)
        self._carrier = carrier
        self.waited = waited

    def deal(self, call: int, parts: Sequence[Any], *, back: bool) -> list[Any]:
        """As `Links.deal`. Raises PeerError where another rank is at another call."""
        wire, start_ns = self._wire, self._wire.clock.now_ns()
        under_way = []
        for place in (*range(self._place + 1, len(parts)), *range(self._place)):  # not all begin with the same one
            if parts[place] is not None:
                described, body = self._carrier.describe(parts[place])
                fields = (self.seq, self.micro, call, int(back), *described, 0.0)
                under_way.append(wire.start(self._ranks[place], Tag.ACTIVATION, fields, *(() if body is None else (body,))))
        taken = [
            part if part is None or place == self._place else self._take(self._ranks[place], call, back)
            for place, part in enumerate(parts)
        ]
        for sending in under_way:
            wire.finish(sending)
        self.waited.ns += wire.clock.now_ns() - start_ns
        return taken

    def _take(self, source: int, call: int, back: bool) -> Any:
        taken = self._wire.take(((source, Tag.ACTIVATION),))
        assert taken is not None
        found, described = tuple(taken[2][:4]), taken[2][4:-1]
        if found != (self.seq, self.micro, call, int(back)):
            raise PeerError(
                f"rank {source} is at {_said(*found)}, expected {_said(self.seq, self.micro, call, back)}: {_ALIKE}", source
            )
        part, body = self._carrier.room(tuple(described))
        if body is not None:
            self._wire.take_body(body)
        return part


def _said(seq: int, micro: int, call: int, back: int) -> str:
    return f"call {call} of its partition, {'backward' if back else 'forward'}, in micro-batch {micro} of mini-batch {seq}"
