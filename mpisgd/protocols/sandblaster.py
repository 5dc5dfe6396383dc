"""Sandblaster: batch optimisation by L-BFGS, with vectors and history on the shards [Dean12 4.2].

    coordinator   each step: a direction by commands to the shards, then a line search; each trial is an evaluation
    evaluation    the batch is dealt in portions (`rules/portions.py`); learners pull once, and push sums of gradients
    shard         keeps vectors, adds, multiplies, sums products and pushes

The clock counts evaluations. The loops are in `sandblaster/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from mpisgd.base.checks import at_least, require
from mpisgd.base.errors import ProtocolError
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.protocol_options import ProtocolOptions
from mpisgd.rules.verdict import APPLY, Verdict


@dataclass(frozen=True)
class SandblasterOptions(ProtocolOptions):
    """sandblaster: L-BFGS on the whole batch; a coordinator commands, learners evaluate portions of mu samples [Dean12 4.2]."""

    batch = True

    iterations: int = 100
    """Most steps of L-BFGS; convergence ends the run sooner."""
    history: int = 10
    """Steps of kept curvature, m; each takes two vectors of each shard's slice."""
    line_search: Literal["strong_wolfe", "none"] = "strong_wolfe"
    """Choose the length of a step, or take 1. strong_wolfe: torch's; mostly a single evaluation, at most 25."""
    tolerance_grad: float = 1e-7
    """Stop where no element of the gradient is larger."""
    tolerance_change: float = 1e-9
    """Stop where neither the loss nor any weight changes by more."""
    weight_decay: float = 0.0
    """Add this times half the squared norm of the weights to the loss."""
    share: float = 1.0
    """Share of the training set in the batch: always the same samples, drawn by the seed."""
    push_every: int = 1
    """Portions summed into a push. Fewer bytes; but the last gradients come later."""
    duplicates: bool = True
    """Deal the slowest portions a second time at the end; the first result counts."""
    order: Literal["arrival", "portions"] = "arrival"
    """Sum gradients as they come, or in the order of portions: the bits then do not depend on speed."""
    log_commands: bool = False
    """Log each command of the optimiser to the shards, with the answers; some 60 an iteration."""

    def __post_init__(self) -> None:
        at_least(
            self, "protocol.", iterations=1, history=1, tolerance_grad=0, tolerance_change=0, weight_decay=0, share=0, push_every=1
        )
        require(0 < self.share <= 1, "protocol.share", self.share, "a share of the training set, above 0 and at most 1")

    def make(self, lambda_: int) -> Sandblaster:
        return Sandblaster(lambda_)


class Sandblaster(Protocol):
    """Answers asked of any protocol; the coordinator judges pushes."""

    consistent = True
    fresh = True

    def __init__(self, lambda_: int) -> None:
        super().__init__(lambda_)
        self.gradients_per_update = lambda_

    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        return APPLY

    def update_due(self) -> bool:
        return False

    def on_update(self) -> None:
        """Note the end of an evaluation."""

    @staticmethod
    def next_clock(timestamp: int) -> NoReturn:
        raise ProtocolError("sandblaster: the coordinator says the clock of a learner")
