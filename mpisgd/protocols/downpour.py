"""Downpour SGD: asynchronous, with n_push and n_fetch apart, and own steps of the learner between [Dean12 4.1].

    every n_fetch mini-batches:  pull weights
    each mini-batch:             gradient g;  accrued += g;  weights -= alpha * g
    every n_push mini-batches:   push accrued;  accrued = 0

(Algorithm 7.1 there.) Own steps: `mini_batches.py`. On the shard each push is an update, as in `async_opt.py`. The rate by
parameter of [Dean12], gamma / sqrt(sum of squares), is `optimizer = "adagrad"`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.base.checks import at_least, require
from mpisgd.protocols.async_opt import AsyncOpt
from mpisgd.rules.admission import Admission
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.protocol_options import ProtocolOptions, check_modulation


@dataclass(frozen=True)
class DownpourOptions(ProtocolOptions):
    """downpour: as async, but learners step by themselves between pushes and pulls [Dean12 4.1]."""

    n_push: int = 1
    """Sum the gradients of this many mini-batches into a push. The learner takes a plain SGD step after each."""
    n_fetch: int | None = None
    """Pull new weights after this many mini-batches; default: n_push. A multiple of n_push: a push comes from weights of one
    clock."""
    local_alpha: float | None = None
    """Learning rate of the learner's own steps; default: alpha0. The schedule applies, too."""
    modulation: str = "none"
    """Weight stale gradients, as in softsync; [Dean12] has none."""
    warm_up: int = 0
    """Let a single learner make this many updates before the others join [Dean12 4.1]."""

    def __post_init__(self) -> None:
        check_modulation(self.modulation)
        at_least(self, "protocol.", n_push=1, n_fetch=1, local_alpha=0, warm_up=0)
        multiple = f"a multiple of protocol.n_push = {self.n_push}: a push must come from weights of one clock"
        require((self.n_fetch or 0) % self.n_push == 0, "protocol.n_fetch", self.n_fetch, multiple)

    @property
    def mini_batches_per_push(self) -> int:
        return self.n_push

    @property
    def mini_batches_per_pull(self) -> int:
        return self.n_fetch or self.n_push

    @property
    def own_alpha(self) -> float | None:
        return self.local_alpha

    def make(self, lambda_: int) -> Downpour:
        admission = Admission(lambda_, self.warm_up, 0)
        return Downpour(lambda_, Modulation(self.modulation), admission, self.mini_batches_per_pull // self.n_push)


class Downpour(AsyncOpt):
    def __init__(self, lambda_: int, modulation: Modulation, admission: Admission, pushes_per_pull: int) -> None:
        super().__init__(lambda_, modulation, admission=admission)
        self.pushes_per_pull = pushes_per_pull
