"""An allreduce whose gradients leave bucket by bucket, while the rest of the backward pass is computed.

    calculate   the gradient; each bucket of it (`vectors/buckets.py`) goes to the rank that owns its slice as soon as it is there,
                and those of the own slice are put in their place when all others have left
    tell        the headers of all, when the passes are over
    wait        for the buckets of others that are still under way
    update      of the own slice, as ever, and all-gather: what has been made leaves, chunk by chunk, as what is held where weights
                are rounded (`held.py`)

Slices stay contiguous, one for each rank, as without buckets: so the order of sums, the log, checkpoints and replay are the same.
What is an all-to-all elsewhere is here a message for each bucket, to one rank. Weights are gathered when the passes are over, which
read them.

No deadlock: the receives of a rank's own buckets are posted before it computes, none waits for a message of the same round, and all
have come before headers of the next are told. From the first bucket on MPI moves them meanwhile (`Communicator.let_move`), or at
the latest when all is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpisgd.comm.communicator import STILL_NBYTES, Buffer, Part
from mpisgd.comm.messages import Goodbye, Push
from mpisgd.exchange.base import Report
from mpisgd.exchange.collectives.channel import TeamChannel
from mpisgd.vectors.computing import Exchanges


class BucketChannel(TeamChannel, Exchanges):
    """A `TeamChannel` that is told of each bucket, in place of a slice, by its number in `buckets`."""

    rounds_in_chunks = True

    def __init__(self, *arguments: Any, buckets: Sequence[Part], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._buckets = buckets
        self._begun: Any = None
        self._made_count = 0
        """Elements of the new weights of this rank's slice."""
        self.leaving_ns = 0

    def begin(self) -> None:
        """From now on the others' buckets may come."""
        self.leaving_ns = 0
        self._begun = self._team.begin_parts(self._gradients, self._received, self._buckets)

    def need(self, shard: int) -> None:
        """All weights are in place."""

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float) -> None:
        """A bucket goes to its owner."""
        start_ns, clock = self.now_ns(), self._wire.clock
        clock.hold()
        self._team.leave(self._begun, shard)
        if self._gradients.nbytes > STILL_NBYTES:
            clock.let_move()
        self.leaving_ns += self.now_ns() - start_ns

    def exchange(self, report: Report) -> list[Push]:
        """What began to leave while the gradient was computed counts in the push's seconds, as does what they could not hide."""
        self._wire.clock.hold()
        pushes = super().exchange(report)
        self._push_ns += self.leaving_ns
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
        self._sharing = self._team.open_shares(self._weights) if self._held is None else self._held.open(self._team)

    def add_chunk(self, chunk: Any) -> None:
        """One of them leaves, where learners go on."""
        if self._made is not None:
            self._made_count += chunk.size
            self._team.share_up_to(self._sharing, self._made, self._made_count)

    def close_answers(self) -> None:
        self._made = None

    def pull(self, meanwhile: Callable[[], None]) -> int:
        """As without buckets; the gradient may change when they have left."""

        def left() -> None:
            self._see_out()
            meanwhile()

        return super().pull(left)

    def goodbyes(self, pushed: int, ending: int) -> list[Goodbye]:
        self._see_out()
        return super().goodbyes(pushed, ending)

    def _see_out(self) -> None:
        if self._begun is not None:
            self._team.see_out(self._begun)

    def _move(self) -> None:
        self._team.finish_parts(self._begun)
