"""The communicator's interface, as the channels use it: `wire.Wire` over MPI, `virtual.wire.VirtualWire` in virtual time.

Every call blocks until what it says is done, or begins something that `header` and `finish` wait for. A rank's own code between
two calls depends on nothing but what it was sent: so the loops cannot know which world they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpisgd.comm.messages import Fields
from mpisgd.comm.presence import Presence

STILL_NBYTES = 2**22
"""A vector of so many bytes at most lies in the kernel's buffers: a thread that looks after it costs more than it hides. Of the
CIFAR-10 network at mu = 64, 28 ms of computing were 32 to 37 beside it."""

Pattern = tuple[int | None, int | None]
"""(source, tag) of a message; None stands for any."""


class Broken(Exception):
    """A rank of this one's group is lost: alone it can do nothing, and the others can go on without the group."""


class Buffer(Protocol):
    """Memory that a body is sent from or received into: a C-contiguous array, or, where only sizes travel, something as large."""

    @property
    def nbytes(self) -> int: ...


class Clock(Protocol):
    """A rank's own seconds, and what goes on while it computes."""

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        """All ranks meet; seconds count from here, where so many have passed already."""

    def now_ns(self) -> int:
        """Nanoseconds since the start of the run."""

    def sleep(self, seconds: float) -> None: ...

    def let_move(self) -> None:
        """The rank computes from here until `hold`: what was begun goes on meanwhile. It must send and receive nothing."""

    def hold(self) -> None:
        """The rank computes no more."""

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        """Call this every now and then while the rank sleeps (and, in virtual time, computes): it may raise to end that."""


class Communicator(Protocol):
    """A rank's end of the wire. A message is a header, whose layout is that of its tag in `messages.LAYOUTS`, and the bodies after
    it."""

    rank: int
    presence: Presence
    """Which of the other ranks are there."""
    signal: int
    """The number of the signal that has told this rank to come to an end; 0 = none has."""
    deaf: bool
    """`take` does not tell of it: who takes messages here hears of signals otherwise."""
    nodes: Sequence[Any]
    """The node of each rank, by any name; none: all are on one."""

    @property
    def clock(self) -> Clock:
        """This rank's own seconds."""

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        """Begin to send a message; the bodies must stay as they are until `finish`.

        Where the layout says `announced`, `finish` waits until the receiver has taken the header.
        """

    def aside(self, body: Any) -> Any:
        """Give what to send in the place of a body that will soon change: itself, or a copy, where the receivers may take long.

        `finish` does not wait for what is sent of a copy.
        """

    def open(self, dest: int, tag: int, fields: Fields) -> Opened:
        """Begin to send a message whose bodies are there one after the other."""

    def post(self, source: int, tag: int, *bodies: Any) -> Any:
        """Say where a message is to go when it comes; of one without bodies, `Posted` says what may be asked.

        Where the tag is a body's: where those of the message are to go that was taken last, while others are taken; `Coming` says
        what may be asked, and `take` must be told of it.
        """

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, bodies: tuple[Any, ...] = ()) -> Any:
        """Post the receive of an answer, then begin to send the question; `header` and `finish` wait for the answer."""

    def header(self, posted: Any) -> Fields:
        """Wait for the header of a message whose receive was posted."""

    def header_or_signal(self, posted: Any) -> None:
        """Wait until the header of a message whose receive was posted is there, or a signal has come."""

    def finish(self, transfer: Any) -> bool:
        """Wait until a message is sent (`start`, which gives a `Leaving`) or received whole (`post`).

        False where that was given up, as the other end hangs (`tolerant.py`): the bodies must then stay as they are for ever.
        """

    def take(
        self, patterns: tuple[Pattern, ...], until_ns: int | None = None, coming: Sequence[Any] = ()
    ) -> tuple[int, int, Fields] | None:
        """Wait for a message that matches one of the patterns, the first ones first; returns source, tag and fields, or None where
        none has come by that nanosecond, or before one of those that are `coming` was whole.

        `coming` must be all that were begun and not yet waited for, in that order.

        Where the last pattern is (None, None) or (None, Tag.INTERRUPT), and a signal has come, that is told once, as if this rank
        had sent itself INTERRUPT.
        """

    def take_body(self, *bodies: Any) -> bool:
        """Receive the bodies of the message that was taken last. Raises PeerError where a size is another.

        False where the sender was lost or hangs (`tolerant.py`): the bodies are then worth nothing, and must not be used again.
        """

    def meet(self) -> None:
        """Wait until all ranks are here."""

    def team(self, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], cuts: Sequence[tuple[int, int]] = ()) -> Team:
        """Some ranks that will act together; each of them calls this, and nobody else. `bounds`, `cuts` are what `Team` says."""

    def node(self, ranks: Sequence[int]) -> Node:
        """Some ranks of one node that will share memory; each of them calls this, and nobody else."""


def is_far(wire: Communicator, rank: int) -> bool:
    """Whether that rank is on another node than the wire's own."""
    return bool(wire.nodes) and wire.nodes[rank] != wire.nodes[wire.rank]


class Leaving(Protocol):
    """A message that is being sent."""

    def has_left(self) -> bool:
        """Whether `finish` would not wait."""


class Coming(Protocol):
    """The bodies of a message that are received while others are taken."""

    def is_whole(self) -> bool:
        """Whether there is nothing more to wait for: it is there, or never will be."""

    def check(self) -> None:
        """Of one that `is_whole`: raises PeerError where it never came, or has another size."""


class Opened(Protocol):
    """A message whose header has left, or will with the rest."""

    def add(self, body: Any) -> None:
        """Begin to send the next body."""

    def close(self) -> Any:
        """All bodies were added; returns what `finish` waits for."""


class Posted(Protocol):
    """A receive of a header without bodies."""

    def arrived(self) -> bool:
        """Whether the message is there."""

    def withdraw(self) -> None:
        """Nothing will come to it any more."""


class Group(Protocol):
    """Ranks that tell each other, each in its place. All call the same, in the same order."""

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        """All-gather: the headers of all, in the order of places."""

    def disband(self) -> None:
        """They act together no more."""


class Team(Group, Protocol):
    """Ranks that act together, each in its place: MPI's collectives. All call the same, in the same order.

    The rank in place p owns the slice `bounds[p]` of a vector that all have; of one that is exchanged, and whose slices travel in
    other words than float32, `cuts[p]`. Vectors are float32, int16 or int32.
    """

    def exchange(self, vector: Any, received: Any) -> None:
        """All-to-all: each slice of `vector` goes to its owner; `received`, (places * own slice,), is what all sent here."""

    def begin_parts(self, vector: Any, received: Any, parts: Sequence[Part]) -> Any:
        """Begin an `exchange` whose parts, which make up the slices, leave one by one: those of the others may come from now on.

        Nothing is exchanged, nor this called, where memory is shared.
        """
        return None

    def leave(self, begun: Any, number: int) -> None:
        """A part of `vector` goes to its owner; it must stay until `see_out`. In virtual time the last parts leave first."""
        return

    def finish_parts(self, begun: Any) -> None:
        """Wait until the others' parts are in `received`, when all of this rank's were told to leave."""
        return

    def see_out(self, begun: Any) -> None:
        """Wait until this rank's parts have left."""
        return

    def share(self, own: Any, vector: Any) -> Any:
        """Begin an all-gather: the owners' slices, of which `own` is one, into `vector`; both must stay until `finish`."""

    def open_shares(self, vector: Any, parts: Sequence[Part]) -> Any:
        """Begin an all-gather as `share` does, of slices that are being made, and made up of these parts, for which `arrive` asks.

        Nor is this called where memory is shared.
        """
        return None

    def share_up_to(self, shared: Any, own: Any, stop: int) -> None:
        """The first `stop` elements of `own` are made, and may leave; `shared` is what `open_shares` gave."""
        return

    def arrive(self, shared: Any, number: int, arrived: Callable[[slice], None] | None = None) -> None:
        """Wait until a part of what `open_shares` began is in place, as `finish` does for all of them."""
        return

    def finish(self, shared: Any, meanwhile: Callable[[], None], arrived: Callable[[slice], None] | None = None) -> None:
        """Wait until what `share` or `open_shares` began is done; of the latter, all of the own slice must be made.

        `meanwhile` is called as soon as the vector that was exchanged may change; `arrived` for each part of the gathered one when
        that is there.
        """


class Part(Protocol):
    """Elements `start` to `end` of a vector, all of the slice of the rank in place `owner`."""

    @property
    def owner(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Node(Protocol):
    """Ranks that share memory, each in its place. All call the same, in the same order.

    What a rank has written before `meet` is what the others read after it; nothing else is promised.
    """

    place: int
    """Number of this rank, from 0."""
    places: int

    def vectors(self, count: int, size: int) -> list[Any]:
        """So many vectors, each (size,) float32, that are the same memory for all; what is in them first, nobody knows."""

    def words(self, count: int) -> Any:
        """(count,) float64, the same memory for all."""

    def meet(self) -> None:
        """Wait until all of these ranks are here."""

    def disband(self) -> None:
        """The memory is there no more: nobody may look at it."""
