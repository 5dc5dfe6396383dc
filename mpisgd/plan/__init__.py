"""From logs to decisions: which N, b or n, and how many shards; each prediction is a short run of the virtual cluster.

plan(["results/run"], wishes=Wishes(target_error=0.03)).backup.best
simulate(fit(Run("results/run")))

It runs whole jobs, and so needs the loops.
"""

from mpisgd.plan.costs.fit import fit
from mpisgd.plan.planner import Wishes, plan

__all__ = ["Wishes", "fit", "plan"]
