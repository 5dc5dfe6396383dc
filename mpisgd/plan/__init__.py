"""Decisions from logs: N, b, n, H, shards, by short virtual runs.

plan(["results/run"], wishes=Wishes(target_error=0.03)).backup.best
simulate(fit(Run("results/run")))
"""

from mpisgd.plan.costs.fit import fit
from mpisgd.plan.planner import Wishes, plan

__all__ = ["Wishes", "fit", "plan"]
