"""Stale synchronous parallel: asynchronous, but no learner runs more than s mini-batches ahead of the slowest [Ho13 3].

Every gradient is an update, as in `async_opt.py`. A learner with p pushes is given weights when

    p - (the fewest pushes of any learner) <= s

No mini-batch p begins before all have pushed p - s: the bound of [Ho13] on a read. With s = 0 all keep step.
tau <= (lambda - 1) (2 s + 1).

With `get_model_frequency` f > 1 the learner steps by itself between pulls: "the push may overlap the local update" [ElasticDL]
(`mini_batches.py`). The bound then holds at pulls; a learner may run f - 1 further before the next.

An unused gradient counts as pushed: it holds up no learner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpisgd.base.checks import at_least
from mpisgd.protocols.async_opt import AsyncOpt
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol_options import ProtocolOptions, check_modulation
from mpisgd.rules.verdict import Verdict


@dataclass(frozen=True)
class SspOptions(ProtocolOptions):
    """ssp: as async, but no learner is more than `slack` mini-batches ahead of the slowest [Ho13; ElasticDL]."""

    slack: int = 3
    """Let no learner be more than this many mini-batches (s) ahead of the slowest. A learner further ahead gets no weights until
    the slowest has caught up."""
    modulation: str = "none"
    """Weight stale gradients, as in softsync; [Ho13] has none."""
    get_model_frequency: int = 1
    """Pull new weights after this many mini-batches [ElasticDL]. Between, the learner steps by itself, by plain SGD."""
    local_alpha: float | None = None
    """Learning rate of the learner's own steps; default: alpha0. The schedule applies, too."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", slack=0, get_model_frequency=1, local_alpha=0)

    @property
    def mini_batches_per_pull(self) -> int:
        return self.get_model_frequency

    @property
    def own_alpha(self) -> float | None:
        return self.local_alpha

    def make(self, lambda_: int) -> Ssp:
        return Ssp(lambda_, Modulation(self.modulation), self.slack, self.get_model_frequency)


class Ssp(AsyncOpt):
    def __init__(self, lambda_: int, modulation: Modulation, slack: int, pushes_per_pull: int = 1) -> None:
        super().__init__(lambda_, modulation)
        self.pushes_per_pull = pushes_per_pull
        self.slack = slack
        self.pushed = [0] * lambda_
        self.least = 0
        self._present_at = Counter({0: lambda_})
        """Number of present learners by pushes."""

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        self._advance(learner_id)
        return super().on_push(learner_id, timestamp, clock)

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:
        self._advance(learner_id)
        self.summed = 1  # an empty update, after which waiting learners are looked at again

    def _advance(self, learner_id: int) -> None:
        self._leave(self.pushed[learner_id])
        self.pushed[learner_id] += 1
        self._present_at[self.pushed[learner_id]] += 1
        self._find_least()

    def _leave(self, pushed: int) -> None:
        self._present_at[pushed] -= 1
        if not self._present_at[pushed]:
            del self._present_at[pushed]

    def _find_least(self) -> None:
        if self._present_at and self.least not in self._present_at:
            self.least = min(self._present_at)

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        self._leave(self.pushed[learner_id])
        self._find_least()

    def on_return(self, learner_id: int, clock: int) -> None:
        """Count the learner as far as the slowest: others need not wait for more."""
        super().on_return(learner_id, clock)
        self.pushed[learner_id] = self.least
        self._present_at[self.least] += 1

    def on_resume(self, next_seq: list[int]) -> None:
        """Count mini-batches as pushes: a learner at mini-batch p has pushed p."""
        self.pushed = list(next_seq)
        self._present_at = Counter(next_seq)
        self.least = min(next_seq)

    def may_pull(self, learner_id: int, clock: int) -> bool:
        return self.pushed[learner_id] - self.least <= self.slack
