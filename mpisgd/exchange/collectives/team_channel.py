"""Both ends of learners doubling as shards, by collectives (`allreduce.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Communicator, Team
from mpisgd.comm.messages import Goodbye, Push, SnapshotPull, Tag
from mpisgd.exchange.deltas import Gathered
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.rules.portions import NO_PORTION
from mpisgd.vectors.body import Body
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import Runs, within


class TeamChannel(ShardChannel):
    """Both ends of a rank.

    The shard answers all pulls at once, by an all-gather; the learner waits in `pull`. All ranks keep the same order, without other
    waits: no deadlock.

    Args:
        row: memory for all learners' gradients for this slice, as they travel (None: shared memory is full), and their bodies.
        rounded: weights are gathered as bfloat16.
    """

    exchanging_ns = 0

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        bounds: tuple[int, int],
        *,
        team: Team,
        memory: Memory,
        row: tuple[Any, Sequence[Body]],
        rounded: bool = False,
    ) -> None:
        super().__init__(wire, roles, learner_id)
        wire.deaf = True  # no rank may end alone: `exchange` tells all
        self.signal = 0
        """Signal told to all ranks in the same round; 0 = none."""
        self._team = team
        self._bounds = bounds
        self._gradients = memory.gradients
        self._received, self._bodies = row
        self._gathered = Gathered(team, memory.weights, memory.weights[slice(*bounds)].nbytes, rounded=rounded)
        self._sharing: Any = None
        self._made: Buffer | None = None
        self._clock = 0
        self._exchanged_ns = self._shared_ns = 0
        self._push_ns = self._wait_ns = self._pull_ns = 0
        self.watched = roles.dedicated_evaluator
        self.now_ns = wire.clock.now_ns
        self.sleep = wire.clock.sleep

    def exchange(self, report: Report) -> list[Push]:
        """Exchange slices of all gradients, into `row`; return the headers in the order of learner_id.

        A push arrives with all headers, before any slice. Its seconds include the wait for the slowest learner, elsewhere part of
        the pull. Raises PeerError: a header with a wrong learner_id or gradient size.
        """
        start_ns, nbytes = self.now_ns(), self._gradients.nbytes
        seconds = (report.compute_ns, report.delay_ns, self._push_ns, self._wait_ns, self._pull_ns, 0)
        computed = (len(report.skipped), report.rounded, report.scale, report.loss)
        told = (self._shard, self._clock, report.seq, report.samples, 1, *seconds, nbytes, NO_PORTION, *computed)
        headers = self._team.tell(Tag.ROUND, (self._wire.signal, *told))
        arrival_ns = self.now_ns()
        pushes = []
        for signal, *fields in headers:
            self.signal = self.signal or signal
            pushes.append(Push(tuple(fields), arrival_ns))
        for learner_id, push in enumerate(pushes):
            if push.learner_id != learner_id:
                raise PeerError(f"learner {learner_id} calls itself learner {push.learner_id}")
            if push.nbytes != nbytes:
                raise PeerError(f"learner {learner_id} has a gradient of {push.nbytes} bytes, expected {nbytes}")
            push.body = self._bodies[learner_id]
        self._tell_skipped(report.skipped, pushes)
        self._move()
        self._exchanged_ns = self.now_ns()
        self._push_ns = self._exchanged_ns - start_ns
        return pushes

    def _tell_skipped(self, own: Runs, pushes: list[Push]) -> None:
        """Exchange skipped runs; each push keeps the runs of this slice."""
        told = [
            self._team.tell(Tag.SKIPPED, tuple(own[number].tolist()) if number < len(own) else (0, 0))
            for number in range(max(push.skipped for push in pushes))
        ]
        for place, push in enumerate(pushes):
            runs = [of_all[place] for of_all in told[: push.skipped]]
            push.runs = within(np.array(runs, np.int64), *self._bounds)

    def _move(self) -> None:
        self._team.exchange(self._gradients, self._received)

    def begin(self) -> None:
        """Prepare for a mini-batch."""

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        self._clock = clock
        self._shared_ns = self.now_ns()
        self._sharing = self._gathered.share(weights)

    def open_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        self._clock, self._made = clock, weights

    def add_chunk(self, chunk: Buffer) -> None:
        """Do nothing: weights are shared whole."""

    def close_answers(self) -> None:
        if self._made is not None:
            self.start_answers([], self._made, self._clock, {})
            self._made = None

    def finish_answers(self, *, last: bool = False) -> bool:
        """Return True: `pull` waits."""
        return True

    def pull(self, meanwhile: Callable[[], None]) -> int:
        """Wait for all weights; return their clock. Call `meanwhile` once gradients may change."""
        self._gathered.finish(self._sharing, meanwhile)
        self._wait_ns = self._shared_ns - self._exchanged_ns
        self._pull_ns = self.now_ns() - self._shared_ns
        return self._clock

    def tell_norm(self, norm: float) -> list[float]:
        return [told for (told,) in self._team.tell(Tag.NORM, (norm,))]

    def snapshot_pull(self) -> SnapshotPull | None:
        """Return the evaluator's request, if any; note a signal, for `exchange` to tell all."""
        patterns = ((self._evaluator_rank, Tag.SNAPSHOT_PULL), (self._evaluator_rank, Tag.INTERRUPT))
        taken = self._wire.take(patterns, self.now_ns())
        if taken is not None and taken[1] == Tag.INTERRUPT:
            self._wire.signal = taken[2][0]
            return None
        return None if taken is None else SnapshotPull(*taken[2])

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        """Do nothing: every learner has a shard."""

    def goodbyes(self, pushed: int, ending: int) -> list[Goodbye]:
        told = self._team.tell(Tag.GOODBYE, (self._shard, pushed, ending))
        self._team.disband()
        return [Goodbye(*fields) for fields in told]
