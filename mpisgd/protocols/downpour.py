"""Downpour SGD [Dean12 4.1]: asynchronous, with n_push and n_fetch apart, and learners that step by themselves between.

    every n_fetch mini-batches:  pull weights
    each mini-batch:             gradient g;  accrued += g;  weights -= alpha * g
    every n_push mini-batches:   push accrued;  accrued = 0

(Algorithm 7.1 there.) The learner's own steps are in `local_steps.py`: for the shard a push is one gradient, of n_push
mini-batches, and becomes an update at once, as in `async_opt.py`. The rate of each parameter, gamma / sqrt(sum of squares), which
[Dean12] recommends, is `optimizer = "adagrad"`. One learner may be let start alone (`admission.py`).
"""

from __future__ import annotations

from mpisgd.protocols.admission import Admission
from mpisgd.protocols.async_opt import AsyncOpt
from mpisgd.protocols.modulation import Modulation


class Downpour(AsyncOpt):
    def __init__(self, lambda_: int, modulation: Modulation, admission: Admission, pushes_per_pull: int) -> None:
        super().__init__(lambda_, modulation, admission=admission)
        self.pushes_per_pull = pushes_per_pull
