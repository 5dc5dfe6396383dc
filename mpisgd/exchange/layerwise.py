"""Pushes and pulls layer by layer, as the passes reach each slice's layers.

    pipelined    weights are pulled whole, at the same clock; a slice is pushed when the backward pass leaves it [Chen16 A.3]
    ahead        a slice's next weights are also requested when its gradient begins to leave: the top layers are updated during the
                 backward pass of lower layers. For hardsync, where any pull waits for the update with the learner's own push
    layerwise    a slice is also pulled when the forward pass reaches it: shards have separate timestamps, and the top layers, read
                 last and pushed first, are the least stale [Chen16 2, Table 1]

Where gradients may be rejected, weights are pulled whole, even at different clocks: the next mini-batch must be known before its
first layer. Weights requested ahead arrive in separate memory: a backward pass may still read finished weights, if used again
behind `detach`.

No pull is waited for between a mini-batch's first and last push: all shards get it, or none. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Communicator
from mpisgd.comm.messages import Ending, Tag
from mpisgd.exchange.channel import LearnerChannel, Slices, bodies_of
from mpisgd.exchange.learner_channel import Answers, Interrupted, Report
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.computing import Exchanges
from mpisgd.vectors.memory import Memory, copy_into
from mpisgd.vectors.skipped import Runs, within


class PipelinedChannel(LearnerChannel, Exchanges):
    """A learner's end pushing each slice when the backward pass leaves it.

    A push reports seconds of its own slice: computing from its weights to its gradient, and delay until then. `push_ns` excludes
    time hidden behind the backward pass.
    """

    def __init__(
        self, wire: Communicator, roles: Roles, learner_id: int, slices: Slices, delays: Delays, *, consistent: bool
    ) -> None:
        super().__init__(wire, roles, learner_id, slices, consistent=consistent)
        self._moves = slices.gradients.nbytes > STILL_NBYTES
        self._delays = delays
        self._sent: list[Any] = []
        self._began_ns = 0
        self._idle_ns = 0
        """Nanoseconds of this mini-batch outside computing."""
        self._needed_ns = [0 for _ in self._shards]
        """Computing in this mini-batch before each slice's weights were needed."""
        self._delay_s = 0.0
        self._pushing_ns = 0

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        return self._begin(super().pull(min_clock, meanwhile))

    def _begin(self, answers: Answers) -> Answers:
        self._began_ns = self.now_ns()
        self._idle_ns = self._pushing_ns = 0
        self._delay_s = 0.0
        return answers

    def _computed_ns(self) -> int:
        return self.now_ns() - self._began_ns - self._idle_ns

    def need(self, shard: int) -> None:
        """Do nothing: the weights are in place."""

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        clock = self._wire.clock
        clock.hold()
        self._delay(seq)
        start_ns, compute_ns = self.now_ns(), self._computed_ns() - self._needed_ns[shard]
        told = {"rounded": rounded, "scale": scale, "skipped": skipped}
        self._begin_push(shard, Report(seq, samples, loss, compute_ns, int(self._delay_s * 1e9), **told))
        self._pushed_for(self.now_ns() - start_ns)
        if self._moves:
            clock.let_move()

    def _begin_push(self, shard: int, report: Report) -> None:
        runs = within(report.skipped, *self._bounds[shard])
        bodies = (*bodies_of(runs), self._gradients[shard])
        self._sent.append(self._wire.start(self._ranks[shard], Tag.PUSH, self._told(shard, report, runs), *bodies))

    def _delay(self, seq: int) -> None:
        """Delay this mini-batch as due for the computing so far."""
        delay_s = self._delays.of(seq, self._computed_ns() * 1e-9)
        if delay_s > self._delay_s:
            start_ns = self.now_ns()
            self._wire.clock.sleep(delay_s - self._delay_s)
            self._idle_ns += self.now_ns() - start_ns
            self._delay_s = delay_s

    def _pushed_for(self, ns: int) -> None:
        self._idle_ns += ns
        self._pushing_ns += ns

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        wire = self._wire
        wire.clock.hold()
        start_ns = self.now_ns()
        if meanwhile is not None:
            meanwhile()
        for transfer in self._sent:
            wire.finish(transfer)
        self._sent.clear()
        self._pushes += 1
        self._pushed_for(self.now_ns() - start_ns)
        self.push_ns = self._pushing_ns


class AheadChannel(PipelinedChannel):
    """A learner's end with early requests, for the protocol's `next_clock`."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        slices: Slices,
        delays: Delays,
        next_clock: Callable[[int], int],
        memory: Memory,
        *,
        consistent: bool,
    ) -> None:
        self._next_clock = next_clock
        self._copied: list[tuple[Any, Any]] = []
        """Slices to compute from, and slices of arrival; none for rounded weights."""
        if slices.held is None:
            come = memory.another().weights
            self._copied = [(memory.weights[start:end], come[start:end]) for start, end in slices.bounds]
            slices = replace(slices, weights=come)
        self._asked: dict[int, Any] = {}
        """Early requests by shard."""
        super().__init__(wire, roles, learner_id, slices, delays, consistent=consistent)

    def _begin_push(self, shard: int, report: Report) -> None:
        super()._begin_push(shard, report)
        (self._asked[shard],) = super()._begin_ask([shard], self._next_clock(self._clocks[shard]))

    def _take_answers(self, shards: list[int], asked: list[Any], min_clock: int) -> tuple[int, int]:
        told = super()._take_answers(shards, asked, min_clock)
        if self._copied and not told[0]:
            for shard in shards:
                copy_into(*self._copied[shard])
        return told

    def _begin_ask(self, shards: list[int], min_clock: int) -> list[Any]:
        """Return the early requests at first use, else ask now."""
        if not self._asked:
            return super()._begin_ask(shards, min_clock)
        asked = [self._asked[shard] for shard in shards]
        self._asked.clear()
        return asked


class LayerwiseChannel(PipelinedChannel):
    """A learner's end also pulling each slice when needed."""

    pulls_within = True
    _min_clock = 0
    _stopped: int = Ending.NONE

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Begin a mini-batch without weights; return the last known clocks, -1 for none, and a shard's stop."""
        if self._wire.signal > 0:
            self._tell_of_signal()
        self._min_clock = min_clock
        if meanwhile is not None:
            meanwhile()
        self._wait_ns = self._pull_ns = 0
        return self._begin(Answers(tuple(self._clocks), self._stopped, False, self._snapshots))

    def need(self, shard: int) -> None:
        """Wait for a slice's weights, whatever other slices' clocks. Raises Interrupted: the shard says stop."""
        start_ns = self.now_ns()
        self._needed_ns[shard] = start_ns - self._began_ns - self._idle_ns
        asked = self._begin_ask([shard], self._min_clock)
        self._stopped, began_ns = self._take_answers([shard], asked, self._min_clock)
        if self._stopped:
            raise Interrupted
        end_ns = self.now_ns()
        self._idle_ns += end_ns - start_ns
        self._wait_ns += began_ns - start_ns
        self._pull_ns += end_ns - began_ns

    def gave_up(self, seq: int) -> None:
        """Do nothing: the shards said so."""
