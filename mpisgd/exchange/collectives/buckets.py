"""An allreduce whose gradients leave, and weights come, bucket by bucket, behind the backward and the forward pass.

    calculate   the gradient; each bucket of it (`vectors/buckets.py`) goes to the rank that owns its slice as soon as it is there,
                and those of the own slice are put in their place when all others have left
    tell        the headers of all, when the passes are over
    wait        for the buckets of others that are still under way
    update      of the own slice, as ever, and all-gather: what has been made leaves, chunk by chunk, as what is held where weights
                are rounded (`held.py`)
    go on       to the next mini-batch: its forward pass waits for the weights of each bucket where it first uses them

Slices stay contiguous, one for each rank, as without buckets: so the order of sums, the log, checkpoints and replay are the same.
What is an all-to-all elsewhere is here a message for each bucket, to one rank. Weights are gathered when the passes are over, which
read them, and while the next begin, lower layers first, which are made first.

No deadlock: the receives of a rank's own buckets are posted before it computes, and those of weights before the first of them is
made; none waits for a message of the same round, and all have come before headers of the next are told. MPI moves them while passes
are computed (`Communicator.let_move`), or at the latest when all is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Buffer, Part
from mpisgd.comm.messages import Goodbye, Push
from mpisgd.exchange.base import Report
from mpisgd.exchange.collectives.channel import TeamChannel
from mpisgd.vectors.computing import Exchanges
from mpisgd.vectors.skipped import Runs


class BucketChannel(TeamChannel, Exchanges):
    """A `TeamChannel` that is told of each bucket, in place of a slice, by its number in `buckets`."""

    rounds_in_chunks = True

    def __init__(self, *arguments: Any, buckets: Sequence[Part], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._buckets = buckets
        self._begun: Any = None
        self._made_count = 0
        """Elements of the new weights of this rank's slice."""
        self._in_parts = False
        """Whether weights come bucket by bucket, and may yet be under way."""
        self._needed_ns = 0
        """Of a mini-batch, in which it waited for weights: the part of `exchanging_ns` that is not the push's."""
        self.exchanging_ns = 0

    def begin(self) -> None:
        """From now on the others' buckets may come."""
        self.exchanging_ns = self._needed_ns = 0
        self._begun = self._team.begin_parts(self._gradients, self._received, self._buckets)
        self._let_move()

    def need(self, shard: int) -> None:
        """Wait for the weights of a bucket; the pull's seconds grow."""
        if not self._in_parts:
            return
        start_ns = self.now_ns()
        self._wire.clock.hold()
        if self._held is None:
            self._team.arrive(self._sharing, shard)
        else:
            self._held.arrive(self._team, self._sharing, shard)
        self._let_move()
        ns = self.now_ns() - start_ns
        self._needed_ns += ns
        self.exchanging_ns += ns
        self._pull_ns += ns

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        """A bucket goes to its owner."""
        start_ns = self.now_ns()
        self._wire.clock.hold()
        self._team.leave(self._begun, shard)
        self._let_move()
        self.exchanging_ns += self.now_ns() - start_ns

    def _let_move(self) -> None:
        if self._gradients.nbytes > STILL_NBYTES:
            self._wire.clock.let_move()

    def exchange(self, report: Report) -> list[Push]:
        """What began to leave while the gradient was computed counts in the push's seconds, as does what they could not hide."""
        self._wire.clock.hold()
        pushes = super().exchange(report)
        self._push_ns += self.exchanging_ns - self._needed_ns
        self._see_out_weights()
        return pushes

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """Where all of what is held travels, it does so as without buckets."""
        if self._held is not None:
            super().start_answers(learner_ids, weights, clock, verdicts)
            return
        self.open_answers(learner_ids, weights, clock, verdicts)
        self.add_chunk(weights)
        self.close_answers()

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        """The new weights are being made, chunk by chunk."""
        super().open_answers(learner_ids, weights, clock, verdicts)
        self._shared_ns, self._made_count = self.now_ns(), 0
        held, team, buckets = self._held, self._team, self._buckets
        self._sharing = team.open_shares(self._weights, buckets) if held is None else held.open(team, buckets)
        self._in_parts = True

    def add_chunk(self, chunk: Any) -> None:
        """One of them leaves, where learners go on."""
        if self._made is not None:
            self._made_count += chunk.size
            self._team.share_up_to(self._sharing, self._made, self._made_count)

    def close_answers(self) -> None:
        self._made = None

    def pull(self, meanwhile: Callable[[], None]) -> int:
        """As without buckets, where all weights travel at once; else they may yet be under way. The gradient may change."""

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
        """Nothing of them is under way: they may change."""
        if not self._in_parts:
            return
        self._in_parts = False
        if self._held is None:
            self._team.finish(self._sharing, _nothing)
        else:
            self._held.finish(self._team, self._sharing, _nothing)

    def _move(self) -> None:
        self._team.finish_parts(self._begun)


def _nothing() -> None:
    """The gradient has left long ago."""
