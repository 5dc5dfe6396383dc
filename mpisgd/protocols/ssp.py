"""Stale synchronous parallel [Ho13 3]: asynchronous, but no learner runs more than s mini-batches ahead of the slowest.

Every gradient is an update, as in `async_opt.py`. A learner that has pushed p gradients is given weights when

    p - (the fewest that any learner has pushed) <= s

and otherwise when the slowest has caught up, or has left. So nobody computes its mini-batch p before everybody has pushed
p - s: the bound of [Ho13] on what a read must include. With s = 0 all keep step. tau <= (lambda - 1) (2 s + 1).

With `get_model_frequency` f > 1 weights are pulled after every f-th mini-batch only, and the learner steps by itself between
[ElasticDL]: what is bounded is then how far ahead it is when it pulls; it may be f - 1 further before it asks again. As there, "the
push may overlap the local update": it steps while the push is under way (`local_steps.py`).

A gradient that is not used counts as pushed all the same: a learner is not held up by what became of others' gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpisgd.base.checks import at_least
from mpisgd.protocols.async_opt import AsyncOpt
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.options import ProtocolOptions, check_modulation
from mpisgd.rules.verdict import Verdict


@dataclass(frozen=True)
class SspOptions(ProtocolOptions):
    """ssp: as async, but no learner is more than `slack` mini-batches ahead of the slowest [Ho13; ElasticDL]."""

    slack: int = 3
    """Let no learner be more than this many mini-batches (s) ahead of the slowest. One that is gets no weights until that one has
    caught up."""
    modulation: str = "none"
    """Weight stale gradients, as in softsync; [Ho13] has none."""
    get_model_frequency: int = 1
    """Pull new weights after this many mini-batches [ElasticDL]. Between, the learner steps by itself, by plain SGD."""
    local_alpha: float | None = None
    """Learning rate of the learner's own steps; default: alpha0. The schedule applies to it, too."""

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
        """Number of those present that have pushed so many gradients."""

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        self._advance(learner_id)
        return super().on_push(learner_id, timestamp, clock)

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:
        self._advance(learner_id)
        self.summed = 1  # an update of nothing: those who wait for this learner are looked at again

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
        """Find the least count. It only grows, and never skips more than those who have left."""
        if self._present_at and self.least not in self._present_at:
            self.least = min(self._present_at)

    def on_departure(self, learner_id: int) -> None:
        super().on_departure(learner_id)
        self._leave(self.pushed[learner_id])
        self._find_least()

    def on_return(self, learner_id: int, clock: int) -> None:
        """Count it as far as the slowest: the others do not wait until it has caught up."""
        super().on_return(learner_id, clock)
        self.pushed[learner_id] = self.least
        self._present_at[self.least] += 1

    def on_resume(self, next_seq: list[int]) -> None:
        """Each mini-batch is a push: who goes on with the p-th has pushed p."""
        self.pushed = list(next_seq)
        self._present_at = Counter(next_seq)
        self.least = min(next_seq)

    def may_pull(self, learner_id: int, clock: int) -> bool:
        return self.pushed[learner_id] - self.least <= self.slack
