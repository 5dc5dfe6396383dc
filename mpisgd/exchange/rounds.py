"""Rounds of a learner: when a slice's gradient is sent, and when its next weights are asked for.

    round        send   ask
    plain        PUSH   PULL    push the gradient, then pull the weights
    duplex       PULL   PULL    ahead = 1: pushed after the next pull's requests, to use both directions of a link; staleness + 1
    prefetch     PULL   BEFORE  ahead = 2: both go on during the next computation; staleness + 2
    pipelined    LEAVE  PULL    per_layer: weights are pulled whole, at the same clock; a slice is pushed when the backward pass
                                leaves it [Chen16 A.3]
    early        LEAVE  LEAVE   the same; a slice's next weights are also requested then: for hardsync, whose pulls wait for the
                                learner's own push
    layerwise    LEAVE  NEED    a slice is also pulled when the forward pass reaches it: shards have separate timestamps, and the
                                top layers are the least stale [Chen16 2, Table 1]

If gradients may be rejected, weights are pulled whole. Weights requested ahead, and prefetch's gradients, have separate memory: a
backward pass may still read older weights.

No pull is waited for between a mini-batch's first and last push by layers: all shards get it, or none (`no-deadlock.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from mpisgd.comm.communicator import STILL_NBYTES, Clock
from mpisgd.gradient.straggler import NO_DELAYS, Delays


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


class Round(NamedTuple):
    """A round; `delays` by layers; `next_clock`: for early requests."""

    send: At
    ask: At
    delays: Delays = NO_DELAYS
    next_clock: Callable[[int], int] | None = None

    @property
    def outlasts_calls(self) -> bool:
        """Transfers go on during computing."""
        return self.send is At.LEAVE or self.ask is At.BEFORE


PLAIN = Round(At.PUSH, At.PULL)
DUPLEX = Round(At.PULL, At.PULL)
PREFETCH = Round(At.PULL, At.BEFORE)
PIPELINED = Round(At.LEAVE, At.PULL)
EARLY = Round(At.LEAVE, At.LEAVE)
LAYERWISE = Round(At.LEAVE, At.NEED)


class Departures:
    """Transfers, requests ahead, and times, of slices exchanged during computing.

    Attributes:
        asked: pending answers by shard.
        within: weights are pulled when needed.
        pushing_ns: without the time hidden behind computing.
        moves: MPI must move transfers during computing.
    """

    def __init__(self, clock: Clock, when: Round, slices: int, nbytes: int) -> None:
        self._clock = clock
        self._delays = when.delays
        self.next_clock = when.next_clock
        self.moves = nbytes > STILL_NBYTES
        self.within = when.ask is At.NEED
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
