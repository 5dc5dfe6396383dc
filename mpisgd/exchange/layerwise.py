"""Pushes and pulls layer by layer: a learner's end where each slice is exchanged as the passes over its layers come to it.

    pipelined    weights are pulled whole, on one clock; each slice of the gradient is pushed as the backward pass leaves it, and
                 travels behind the rest of that pass [Chen16 A.3]
    ahead        and the next weights of each slice are asked for as soon as its gradient begins to leave: so a slice of the top
                 layers is summed, updated and on its way back while the backward pass computes those below. For hardsync, where a
                 pull waits for the update that has the learner's own push: asked earlier, it is given the same weights
    layerwise    each slice of the weights is pulled, too, as the forward pass reaches it: so every shard's timestamp is its own,
                 and the top layers, which are read last and pushed first, are the least stale [Chen16 2, Table 1]

Where gradients may be rejected, weights are pulled whole, too, of one clock or not: which mini-batch is next must be known before
its first layer. Where a gradient is clipped or dropped as a whole, all of its slices are pushed at the end of the backward pass.

Weights that are asked for ahead come into memory of their own, and are copied when all are there: a backward pass may yet read
weights whose gradient is done, as where they are used a second time behind `detach`.

To the learner's loop these are channels as any: what it asks for has mostly been done, within `compute`. Between the first slice of
a mini-batch that is pushed and the last it waits for no pull, and the loop finishes all of them before it waits for one: so each
mini-batch comes to all shards or to none. Nothing is new of deadlocks (law 1): the receives of what is asked for ahead are posted,
and a shard keeps a pull until the update, which waits for the push ahead of it. A learner that is told to stop, in a forward pass,
has pushed nothing of that mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Communicator
from mpisgd.comm.messages import Ending, Tag
from mpisgd.exchange.base import Answers, Interrupted, Report
from mpisgd.exchange.channel import LearnerChannel, Slices, bodies_of
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.computing import Exchanges
from mpisgd.vectors.memory import Memory, copy_into
from mpisgd.vectors.skipped import Runs, within


class PipelinedChannel(LearnerChannel, Exchanges):
    """A learner's end that pushes each slice when it is left; the rest is as in `LearnerChannel`.

    What a push tells of seconds is its own slice's: computing from its weights to its gradient, and how long it was delayed on
    purpose until then. `push_ns` is what the learner spent on its last push, not what was hidden behind its backward pass.
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
        """Nanoseconds of this mini-batch spent on anything but computing."""
        self._needed_ns = [0 for _ in self._shards]
        """Computing in this mini-batch until the weights of each slice were needed."""
        self._delay_s = 0.0
        self._pushing_ns = 0

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        return self._begin(super().pull(min_clock, meanwhile))

    def _begin(self, answers: Answers) -> Answers:
        """A mini-batch begins."""
        self._began_ns = self.now_ns()
        self._idle_ns = self._pushing_ns = 0
        self._delay_s = 0.0
        return answers

    def _computed_ns(self) -> int:
        return self.now_ns() - self._began_ns - self._idle_ns

    def need(self, shard: int) -> None:
        """Its weights are in place."""

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        """Begin to push a slice; it moves while the pass goes on, and `push` finishes it."""
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
        """Be as late as this mini-batch is to be, by what it has computed so far."""
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
        """Wait until the slices that were left have been sent; beginning to send them counts in `push_ns`, too."""
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
    """A learner's end; `next_clock` is the protocol's, `memory` that in which it computes."""

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
        """For each shard, the slice that is computed from, and where it comes; none where what comes is rounded, and lies apart."""
        if slices.held is None:
            come = memory.another().weights
            self._copied = [(memory.weights[start:end], come[start:end]) for start, end in slices.bounds]
            slices = replace(slices, weights=come)
        self._asked: dict[int, Any] = {}
        """What was asked for of each shard, and has not been taken."""
        super().__init__(wire, roles, learner_id, slices, delays, consistent=consistent)

    def _begin_push(self, shard: int, report: Report) -> None:
        super()._begin_push(shard, report)
        (self._asked[shard],) = super()._begin_ask([shard], self._next_clock(self._clocks[shard]))

    def _take_answers(self, shards: list[int], asked: list[Any], min_clock: int) -> tuple[int, int]:
        """Put the weights in their place, too, which counts in the pull's seconds."""
        told = super()._take_answers(shards, asked, min_clock)
        if self._copied and not told[0]:
            for shard in shards:
                copy_into(*self._copied[shard])
        return told

    def _begin_ask(self, shards: list[int], min_clock: int) -> list[Any]:
        """What was asked for ahead, the first time that it is looked for; else as ever."""
        if not self._asked:
            return super()._begin_ask(shards, min_clock)
        asked = [self._asked[shard] for shard in shards]
        self._asked.clear()
        return asked


class LayerwiseChannel(PipelinedChannel):
    """A learner's end that also pulls each slice when it is needed."""

    pulls_within = True
    _min_clock = 0
    _stopped: int = Ending.NONE

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Nothing yet, but that the run is over where a shard has said so. The clocks are the last that are known, -1 for none."""
        if self._wire.signal > 0:
            self._tell_of_signal()
        self._min_clock = min_clock
        if meanwhile is not None:
            meanwhile()
        self._wait_ns = self._pull_ns = 0
        return self._begin(Answers(tuple(self._clocks), self._stopped, False, self._snapshots))

    def need(self, shard: int) -> None:
        """Wait for the weights of a slice, whatever their clock; the pull's seconds grow.

        Raises Interrupted where the shard says that the run is over.
        """
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
        """Do nothing: it was the shards who said so."""
