"""Ways of exchange: when a slice's gradient is sent, and when its next weights are asked for.

    way          send   ask
    whole        PUSH   PULL    push the whole gradient, then pull all weights
    in-place     PUSH   PULL    the same, in memory of one node (`travel/in_place.py`)
    streamed     PULL   PULL    the same bits, in chunks (`travel/streamed.py`)
    duplex       PULL   PULL    pushed after the next pull's requests, to use both directions of a link; staleness + 1
    prefetch     PULL   BEFORE  both go on during the next computation; staleness + 2
    pipelined    LEAVE  PULL    weights are pulled whole, at the same clock; a slice is pushed when the backward pass leaves it
                                [Chen16 A.3]
    ahead        LEAVE  LEAVE   a slice's next weights are also requested when its gradient begins to leave: for hardsync, whose
                                pulls wait for the learner's own push
    layerwise    LEAVE  NEED    a slice is also pulled when the forward pass reaches it: shards have separate timestamps, and the
                                top layers are the least stale [Chen16 2, Table 1]

If gradients may be rejected, weights are pulled whole. Weights requested ahead, and prefetch's gradients, have separate memory: a
backward pass may still read older weights.

No pull is waited for between a mini-batch's first and last push by layers: all shards get it, or none. No deadlock:
`no-deadlock.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from mpisgd.base.errors import ConfigError
from mpisgd.comm.communicator import STILL_NBYTES, Clock
from mpisgd.config import Config, compatibility, replace
from mpisgd.exchange.link_load import load_of
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.travel import in_place
from mpisgd.gradient.straggler import NO_DELAYS, Delays
from mpisgd.vectors.buckets import BUCKET_NBYTES
from mpisgd.vectors.chunks import CHUNK_NBYTES

AUTO, IN_PLACE = "auto", "in-place"
LEAST_NBYTES = 4 * CHUNK_NBYTES
"""Least bytes of a slice to stream."""
# In buckets an MLP of 44 MB on 2, 4 nodes is 1.09, 1.10 times as fast as whole at 1 Gbit/s; 1.02, 0.97 at 2.5; 0.95 at 5 (2 nodes).
# Slices of 2.7, 2, 1 MB at 1 Gbit/s: 1.19, 1.03, 1.00.
SLOW = 2e8
"""Most bytes per second of links where an allreduce's buckets gain."""


class At(Enum):
    """Points of a learner's round."""

    BEFORE = "before"
    """The pull of the round before."""
    PULL = "pull"
    NEED = "need"
    """The forward pass reaches a slice's layers."""
    LEAVE = "leave"
    """The backward pass leaves them."""
    PUSH = "push"


class Way(NamedTuple):
    """A way; `delays` by layers, `next_clock`: the protocol's, where weights are requested before the next pull."""

    send: At
    ask: At
    delays: Delays = NO_DELAYS
    next_clock: Callable[[int], int] | None = None

    @property
    def outlasts_calls(self) -> bool:
        """Transfers go on while the learner computes."""
        return self.send is At.LEAVE or self.ask is At.BEFORE


WHOLE = Way(At.PUSH, At.PULL)
DUPLEX = Way(At.PULL, At.PULL)
PREFETCH = Way(At.PULL, At.BEFORE)
PIPELINED = Way(At.LEAVE, At.PULL)
AHEAD = Way(At.LEAVE, At.LEAVE)
LAYERWISE = Way(At.LEAVE, At.NEED)


def chosen(config: Config) -> tuple[str, ...]:
    """Return the program's choices, of the same bits; the last in parts."""
    return ("whole", "layerwise") if config.protocol.collective else ("whole", IN_PLACE, "streamed")


def alike(config: Config) -> tuple[str, ...]:
    """Return exchanges of the same bits."""
    return (AUTO, *chosen(config)) if config.exchange in (AUTO, *chosen(config)) else (config.exchange,)


def choose(
    config: Config,
    roles: Roles,
    hosts: Sequence[str],
    bounds: Sequence[tuple[int, int]],
    rate: Callable[[], float],
    shares: Callable[[], bool] = lambda: True,
) -> Config:
    """Name the exchange where the user does not. All ranks ask, or none.

    Args:
        rate: bytes per second of links.
        shares: whether ranks of a node can share memory.

    Raises ConfigError: in-place, where impossible.
    """
    if config.exchange not in (AUTO, IN_PLACE):
        return config
    if in_place.is_possible(config, roles, hosts) and shares():
        return replace(config, exchange=IN_PLACE)
    if config.exchange == IN_PLACE:
        raise ConfigError(
            f"exchange = {IN_PLACE!r}: expected 'auto' beside these options: hardsync alone, of float32 vectors, has all ranks on"
            " one node that lets them share memory, and is not fault-tolerant"
        )
    whole, parts = (replace(config, exchange=each) for each in (chosen(config)[0], chosen(config)[-1]))
    if roles.tolerant or config.in_groups or compatibility.refused(parts):
        return whole
    collective, nbytes = config.protocol.collective, 4 * max(end - start for start, end in bounds)
    if nbytes < (BUCKET_NBYTES if collective else LEAST_NBYTES) or not load_of(config, roles, hosts, bounds)[1]:
        return whole
    # rounded shares are logged by bucket
    return whole if collective and (config.push_format != "float32" or rate() > SLOW) else parts


class Departures:
    """Transfers, requests ahead, and times, of slices exchanged during computing.

    Attributes:
        asked: pending answers by shard.
        within: weights are pulled when needed.
        pushing_ns: without the time hidden behind computing.
        moves: MPI must move transfers during computing.
    """

    def __init__(self, clock: Clock, way: Way, slices: int, nbytes: int) -> None:
        self._clock = clock
        self._delays = way.delays
        self.next_clock = way.next_clock
        self.moves = nbytes > STILL_NBYTES
        self.within = way.ask is At.NEED
        self.sent: list[Any] = []
        self.asked: dict[int, Any] = {}
        self._began_ns = self._idle_ns = 0
        self._needed_ns = [0] * slices
        """Computing in this mini-batch before each slice's weights were needed."""
        self._delay_s = 0.0
        self.pushing_ns = 0

    def take_sent(self) -> list[Any]:
        sent, self.sent = self.sent, []
        return sent

    def take_asked(self) -> list[Any]:
        """Return answers requested ahead, in the order of shards."""
        asked, self.asked = self.asked, {}
        return [asked[shard] for shard in sorted(asked)]

    def begin(self) -> None:
        self._began_ns = self._clock.now_ns()
        self._idle_ns = self.pushing_ns = 0
        self._delay_s = 0.0

    def _computed_ns(self, now_ns: int) -> int:
        return now_ns - self._began_ns - self._idle_ns

    def note_need(self, shard: int, now_ns: int) -> None:
        self._needed_ns[shard] = self._computed_ns(now_ns)

    def pulled_for(self, ns: int) -> None:
        self._idle_ns += ns

    def pushed_for(self, ns: int) -> None:
        self._idle_ns += ns
        self.pushing_ns += ns

    def of_push(self, shard: int, seq: int) -> tuple[int, int]:
        """Delay this mini-batch as due; return nanoseconds of computing a slice's gradient, and of delay."""
        now_ns = self._clock.now_ns()
        delay_s = self._delays.of(seq, self._computed_ns(now_ns) * 1e-9)
        if delay_s > self._delay_s:
            self._clock.sleep(delay_s - self._delay_s)
            self._idle_ns += self._clock.now_ns() - now_ns
            self._delay_s = delay_s
        return self._computed_ns(self._clock.now_ns()) - self._needed_ns[shard], int(self._delay_s * 1e9)
