"""Interface of a communicator: `wire.Wire` over MPI, `virtual.wire.VirtualWire` in virtual time.

Calls block until done, or begin a transfer for `header` and `finish`. Between calls a rank's code depends only on received
messages, so the loops cannot know their world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpisgd.comm.messages import Fields
from mpisgd.comm.presence import Presence

STILL_NBYTES = 2**22
"""Bytes that fit the kernel's buffers: a thread to move them costs more than it hides (TRAPS 11)."""

Pattern = tuple[int | None, int | None]
"""(source, tag) of a message; None = any."""


class Broken(Exception):
    """Loss of another rank of the own group: this rank can do nothing more, other groups go on."""


class Buffer(Protocol):
    """Memory of a body: a C-contiguous array, or a stand-in where only sizes travel."""

    @property
    def nbytes(self) -> int: ...


class Clock(Protocol):
    @property
    def calls(self) -> bool:
        """`let_move` calls `send`."""

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        """Meet all ranks; count seconds from `already_s`."""

    def now_ns(self) -> int:
        """Return nanoseconds since the start."""

    def sleep(self, seconds: float) -> None: ...

    def let_move(self, send: Callable[[], None] | None = None) -> None:
        """Let transfers move while the rank computes, until `hold`; meanwhile only `send`, called often, sends or receives."""

    def hold(self) -> None:
        """End computing."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call `check`, which may raise, now and then in sleeps (in virtual time, also in computing)."""


class Communicator(Protocol):
    """A rank's end of the wire. A message is a header (`messages.LAYOUTS`) and its bodies."""

    rank: int
    presence: Presence
    signal: int
    """Number of the signal that told this rank to end; 0 = none."""
    deaf: bool
    """Signals are heard elsewhere, not by `take`."""
    nodes: Sequence[Any]
    """Node of each rank, by any name; empty = a single node."""

    @property
    def clock(self) -> Clock:
        """This rank's clock."""

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        """Begin to send a message; bodies must not change until `finish`.

        By an announced layout, `finish` waits until the receiver has taken the header.
        """

    def aside(self, body: Any) -> Any:
        """Return a body that will soon change, or a copy if receivers may be slow; `finish` does not wait for copies."""

    def open(self, dest: int, tag: int, fields: Fields) -> OpenMessage:
        """Begin to send a message; bodies are added as made."""

    def post(self, source: int, tag: int, *bodies: Any) -> Any:
        """Post a message's receive; without bodies, return a `Posted`.

        By a body's tag: receive bodies of the message taken last, beside other messages; return `IncomingBodies` for `take`.
        """

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, bodies: tuple[Any, ...] = ()) -> Any:
        """Post an answer's receive, then send the question; `header` and `finish` wait for the answer."""

    def header(self, posted: Any) -> Fields:
        """Wait for a posted message's header."""

    def header_or_signal(self, posted: Any) -> None:
        """Wait for a posted message's header, or a signal."""

    def finish(self, transfer: Any) -> bool:
        """Wait until a message is sent (`start`) or received whole (`post`).

        Return False if given up because the other end hangs (`tolerant.py`): the bodies must stay untouched for ever.
        """

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Wait for a message, first patterns first; return source, tag and fields.

        Return None at `until_ns`, or once a body in `coming` (all begun, unfinished bodies, in order) is whole. If the last pattern
        is (None, None) or (None, Tag.INTERRUPT), a signal is told once, as this rank's own INTERRUPT.
        """

    def take_body(self, *bodies: Any) -> bool:
        """Receive the last message's bodies. Raises PeerError: another size.

        Return False if the sender was lost or hangs: the bodies must not be used again.
        """

    def meet(self) -> None:
        """Wait for all ranks."""

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], cuts: Sequence[tuple[int, int]] = ()) -> Team:
        """Return a team; exactly its ranks call this. `bounds`, `cuts`: as of `Team`."""

    def segment(self, ranks: Sequence[int], sizes: Sequence[int]) -> Segment | None:
        """Return memory that these ranks share, with `sizes` bytes by place; None if impossible. Exactly these ranks call this."""


def is_far(wire: Communicator, rank: int) -> bool:
    return bool(wire.nodes) and wire.nodes[rank] != wire.nodes[wire.rank]


class IncomingBodies(Protocol):
    def is_whole(self) -> bool:
        """Return whether all bodies are there, or never will be."""

    def check(self) -> None:
        """Raise PeerError if bodies never came or have another size; call once `is_whole`."""


class OpenMessage(Protocol):
    def add(self, body: Any) -> None:
        """Begin to send the next body."""

    def close(self) -> Any:
        """Return a transfer for `finish`."""


class Posted(Protocol):
    def arrived(self) -> bool:
        """Return whether the message is there."""

    def withdraw(self) -> None:
        """Cancel: no message will come."""


class Group(Protocol):
    """Ranks in places; all make the same calls in the same order."""

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """Return all headers by place (all-gather)."""

    def disband(self) -> None:
        """End the group."""


class Team(Group, Protocol):
    """Ranks that act together, by MPI's collectives, on float32, int16 or int32 vectors.

    Place p owns slice `bounds[p]`; `cuts[p]` if an exchanged vector travels in other words than float32.
    """

    def exchange(self, vector: Any, received: Any) -> None:
        """Send each slice of `vector` to its owner (all-to-all); `received`, (places * own slice,), gets all slices sent here."""

    def begin_parts(self, vector: Any, received: Any, parts: Sequence[Part]) -> Any:
        """Begin an `exchange` by parts, until `see_out`; others' parts may come from now on."""
        return None

    def leave(self, begun: Any, number: int) -> None:
        """Send a part, unchanged until `see_out`; in virtual time the last parts leave first."""
        return

    def finish_parts(self, begun: Any) -> None:
        """Wait for the others' parts; call after the last `leave`."""
        return

    def see_out(self, begun: Any) -> None:
        """Wait until own parts have left."""
        return

    def share(self, own: Any, vector: Any) -> Any:
        """Begin an all-gather of owners' slices into `vector`; keep `own` and `vector` unchanged until `finish`."""

    def open_shares(self, vector: Any, parts: Sequence[Part]) -> Any:
        """Begin an all-gather of slices still being made; `arrive` awaits their parts."""
        return None

    def share_up_to(self, shared: Any, own: Any, stop: int) -> None:
        """Let the first `stop` elements of `own`, now made, leave."""
        return

    def arrive(self, shared: Any, number: int, arrived: Callable[[slice], None] | None = None) -> None:
        """Wait for a part of an `open_shares`, as `finish` does for all."""
        return

    def finish(self, shared: Any, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        """Wait for a `share` or `open_shares`; the own slice must be made.

        `meanwhile` is called once the exchanged vector may change, `arrived` for each gathered part.
        """


class Part(Protocol):
    """Elements of a vector, all within the slice of place `owner`."""

    @property
    def owner(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Segment(Protocol):
    """Memory that ranks of a node share. All make the same calls in the same order.

    `meet` makes earlier writes visible to all; nothing else is promised.
    """

    place: int
    places: int

    def bytes_of(self, place: int) -> np.ndarray:
        """Return a rank's bytes, (nbytes,) uint8, zero at first; a page lies near the rank that first writes there."""

    def meet(self) -> None:
        """Wait for all these ranks."""

    def disband(self) -> None:
        """Free the memory: no rank may look at it again."""
