"""Calls of a partition as messages between a group's ranks (`models/partition.py`).

No deadlock, and nothing rests on buffers: in each call a rank begins all sends, receives from the same partners, then waits for its
sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import Tag
from mpisgd.vectors.computing import Waited


class Carrier(Protocol):
    """Kind of parts: tensors, or sizes in virtual time."""

    def describe(self, part: Any) -> tuple[tuple[int, ...], Any]:
        """Return a part's description for the header, and its bytes, or None."""

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        """Return memory for a described part, and its bytes, or None."""


_ALIKE = "all pieces of a model make the same calls in the same order"


class WireLinks:
    """A rank's `Links`, for mini-batch `seq` and micro-batch `micro`; `ranks`: the group's, in the order of pieces."""

    def __init__(self, wire: Communicator, ranks: Sequence[int], carrier: Carrier, waited: Waited) -> None:
        self.seq = self.micro = 0
        self._wire = wire
        self._ranks = ranks
        self._place = ranks.index(wire.rank)
        self._carrier = carrier
        self.waited = waited

    def deal(self, call: int, parts: Sequence[Any], *, back: bool) -> list[Any]:
        """Exchange parts. Raises PeerError: a rank is at another call."""
        wire, start_ns = self._wire, self._wire.clock.now_ns()
        under_way = []
        for place in (*range(self._place + 1, len(parts)), *range(self._place)):  # ranks begin with different partners
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
