"""hardsync: the shard waits for all learners, averages, updates [Zhang16 2.2, eq. 1].

    theta(t+1) = theta(t) - alpha * (1/lambda) * sum over all learners l of g_l(theta(t))

Staleness is always 0. Gradients are summed in the order of learner_id: the same seed gives the same bits (law 5). A gradient before
its turn is parked, to hide its transfer behind slower learners; short of memory, its learner stays blocked in the send, instead of
in the pull.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.base.errors import ProtocolError
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions
from mpisgd.rules.verdict import APPLY, Verdict


@dataclass(frozen=True)
class HardsyncOptions(ProtocolOptions):
    """hardsync: all learners' gradients make an update; staleness is always 0 [Zhang16 2.2, eq. 1]."""

    streams = True
    alike = True

    @property
    def fresh(self) -> bool:
        return True

    @property
    def teams(self) -> bool:
        return True

    def make(self, lambda_: int) -> Hardsync:
        return Hardsync(lambda_)


@dataclass(frozen=True)
class AllreduceOptions(HardsyncOptions):
    """allreduce: hardsync with learners that double as shards: reduce-scatter, update, all-gather; the baseline [Chen16 5]."""

    collective = True
    streams = False


class Hardsync(Protocol):
    consistent = True
    fresh = True
    ordered = True
    lockstep = True

    def __init__(self, lambda_: int) -> None:
        super().__init__(lambda_)
        self.gradients_per_update = lambda_
        self.heard = set[int]()
        self._begin()

    def _begin(self) -> None:
        """Await all present learners, from the end of the list."""
        self.missing = sorted(self.present, reverse=True)
        self.heard.clear()

    def expects(self) -> int | None:
        return self.missing[-1] if self.missing else None

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        if timestamp != clock:
            raise ProtocolError(f"hardsync: learner {learner_id} pushed timestamp {timestamp} at clock {clock}")
        self._hear(learner_id)
        return APPLY

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:
        self._hear(learner_id)

    def _hear(self, learner_id: int) -> None:
        self.heard.add(learner_id)
        if self.expects() == learner_id:
            self.missing.pop()
        elif learner_id in self.missing:  # out of turn: a learner that leaves
            self.missing.remove(learner_id)

    def update_due(self) -> bool:
        return bool(self.heard) and not self.missing

    def on_update(self) -> None:
        self._begin()

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        if learner_id in self.missing:
            self.missing.remove(learner_id)

    def on_return(self, learner_id: int, clock: int) -> None:
        """Await the learner in this update, too, unless already heard: it has the weights."""
        super().on_return(learner_id, clock)
        if learner_id not in self.heard:
            self.missing = sorted([*self.missing, learner_id], reverse=True)

    @staticmethod
    def next_clock(timestamp: int) -> int:
        return timestamp + 1
