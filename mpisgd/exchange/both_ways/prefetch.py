"""Push and pull during the next computation: the learner waits only for transfers longer than computing.

    computes     under way meanwhile
       0         weights for 1
       1         weights for 2, gradient 0
       2         weights for 3, gradient 1

Weights, requested before the previous gradient leaves, are two rounds older than with `whole`. MPI moves begun transfers during
computing (`Communicator.let_move`), or at the latest afterwards. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import PushFields, Tag
from mpisgd.exchange.deltas import Held
from mpisgd.exchange.exchange import Answers, Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices, bodies_of
from mpisgd.exchange.roles import Roles
from mpisgd.vectors.memory import Memory, copy_into
from mpisgd.vectors.skipped import within


class PrefetchChannel(LearnerChannel):
    """A learner's end computing in `memory`; pulls must not wait for its own push."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        memory: Memory,
        bounds: list[tuple[int, int]],
        *,
        rounded: bool = False,
        in_pieces: bool = False,
    ) -> None:
        self._memory, self._travels = memory, memory.another()
        held = Held(self._travels.weights, bounds, apart=False) if rounded else None
        slices = Slices(self._travels.weights, self._travels.gradients, bounds, memory.cuts, held, in_pieces=in_pieces)
        super().__init__(wire, roles, learner_id, slices, consistent=False)
        self.duplex = True
        self._asked: list[Any] = []
        self._least = 0
        """Least clock of the requested weights."""
        self._copies: list[tuple[PushFields, tuple[Any, ...]]] = []
        """Headers and skipped runs of the next gradient to leave."""
        self._leaving: list[Any] = []

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Copy the gradient for the next pull, once the previous has left.

        Raises ProtocolError: a second push without a pull.
        """
        if meanwhile is not None:
            raise ProtocolError("exchange = 'prefetch': two pushes, no pull in between")
        wire = self._wire
        wire.clock.hold()
        start_ns = self.now_ns()
        self._see_out_leaving()
        copy_into(self._travels.gradients, self._memory.gradients)
        runs = [within(report.skipped, *bounds) for bounds in self._bounds]
        self._copies = [(self._told(shard, report, runs[shard]), bodies_of(runs[shard])) for shard in self._shards]
        self._wait_ns = self._pull_ns = 0
        self.push_ns = self.now_ns() - start_ns

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Take weights requested a mini-batch ago, request the next, begin to send the last push."""
        wire = self._wire
        if self._asked:
            if wire.signal > 0:
                self._tell_of_signal()
            start_ns = self.now_ns()
            stop, began_ns = self._take_answers(self._shards, self._asked, self._least)
            self._wait_ns, self._pull_ns = began_ns - start_ns, self.now_ns() - began_ns
            answers = Answers(tuple(self._clocks), stop, False, self._snapshots)
        else:
            answers = super().pull(min_clock)
        self._asked = []
        if not answers.stop:
            copy_into(self._memory.weights, self._travels.weights)
            self._asked, self._least = self._ask(self._shards, min_clock), min_clock
        if self._copies:
            self._leaving, self._copies = self._send_noted(self._copies), []
        if meanwhile is not None:
            meanwhile()
        wire.clock.let_move()
        return answers

    def _send_noted(self, noted: list[tuple[PushFields, tuple[Any, ...]]]) -> list[Any]:
        self._pushes += 1
        sent = zip(self._ranks, noted, self._pushed, strict=True)
        return [self._wire.start(rank, Tag.PUSH, told, *runs, *bodies) for rank, (told, runs), bodies in sent]

    def goodbye(self, *, ending: int) -> None:
        self._wire.clock.hold()
        if self._asked:
            self._take_answers(self._shards, self._asked, self._least)
        self._see_out_leaving()
        super().goodbye(ending=ending)

    def _see_out_leaving(self) -> None:
        for transfer in self._leaving:
            self._wire.finish(transfer)
        self._leaving = []
