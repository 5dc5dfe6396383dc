"""Allreduce by buckets: gradients leave behind the backward pass, weights come behind the forward pass.

    calculate   each complete bucket (`vectors/buckets.py`) goes to the owner of its slice, own buckets into place at last
    tell        all headers, after the passes
    wait        for buckets still under way
    update      the own slice; weights, or d where rounded (`deltas.py`), leave in chunks when made
    go on       to the next mini-batch: its forward pass waits for each bucket's weights at first use

Slices stay contiguous, so sums, log, checkpoints and replay are as without buckets. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Buffer, Part
from mpisgd.comm.messages import Goodbye, Push
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.exchange.exchange import Report
from mpisgd.vectors.computing import Exchanges
from mpisgd.vectors.skipped import Runs


class BucketChannel(TeamChannel, Exchanges):
    """A `TeamChannel` told of buckets in place of slices."""

    rounds_in_chunks = True

    def __init__(self, *arguments: Any, buckets: Sequence[Part], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._buckets = buckets
        self._begun: Any = None
        self._made_count = 0
        self._in_parts = False
        """Weights come in buckets, and may be under way."""
        self._needed_ns = 0
        """Waits for weights: the part of `exchanging_ns` outside the push."""
        self.exchanging_ns = 0

    def begin(self) -> None:
        self.exchanging_ns = self._needed_ns = 0
        self._begun = self._team.begin_parts(self._gradients, self._received, self._buckets)
        self._let_move()

    def need(self, shard: int) -> None:
        if not self._in_parts:
            return
        start_ns = self.now_ns()
        self._wire.clock.hold()
        self._gathered.arrive(self._sharing, shard)
        self._let_move()
        ns = self.now_ns() - start_ns
        self._needed_ns += ns
        self.exchanging_ns += ns
        self._pull_ns += ns

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        start_ns = self.now_ns()
        self._wire.clock.hold()
        self._team.leave(self._begun, shard)
        self._let_move()
        self.exchanging_ns += self.now_ns() - start_ns

    def _let_move(self) -> None:
        if self._gradients.nbytes > STILL_NBYTES:
            self._wire.clock.let_move()

    def exchange(self, report: Report) -> list[Push]:
        self._wire.clock.hold()
        pushes = super().exchange(report)
        self._push_ns += self.exchanging_ns - self._needed_ns
        self._see_out_weights()
        return pushes

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        if self._gathered.rounded:
            super().start_answers(learner_ids, weights, clock, verdicts)
            return
        self.open_answers(learner_ids, weights, clock, verdicts)
        self.add_chunk(weights)
        self.close_answers()

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        super().open_answers(learner_ids, weights, clock, verdicts)
        self._shared_ns, self._made_count = self.now_ns(), 0
        self._sharing = self._gathered.open(self._buckets)
        self._in_parts = True

    def add_chunk(self, chunk: Any) -> None:
        if self._made is not None:
            self._made_count += chunk.size
            self._team.share_up_to(self._sharing, self._made, self._made_count)

    def close_answers(self) -> None:
        self._made = None

    def pull(self, meanwhile: Callable[[], None]) -> int:
        """Return the clock; weights in buckets may still be under way."""

        def left() -> None:
            self._see_out()
            meanwhile()

        if not self._in_parts:
            return super().pull(left)
        left()
        self._wait_ns = self._shared_ns - self._exchanged_ns
        self._pull_ns = self.now_ns() - self._shared_ns
        return self._clock

    def goodbyes(self, pushed: int, ending: int) -> list[Goodbye]:
        self._see_out()
        self._see_out_weights()
        return super().goodbyes(pushed, ending)

    def _see_out(self) -> None:
        if self._begun is not None:
            self._team.see_out(self._begun)

    def _see_out_weights(self) -> None:
        if not self._in_parts:
            return
        self._in_parts = False
        self._gathered.finish(self._sharing, _nothing)

    def _move(self) -> None:
        self._team.finish_parts(self._begun)


def _nothing() -> None:
    """Do nothing: the gradient left long ago."""
