"""Training on a virtual cluster: `simulate` runs the loops of real ranks on virtual ones, in virtual time (DESIGN 3).

`job.py` is to virtual ranks what `job/run.py` is to real ones; what both build is in `job/parts.py`, what both run in `learner.py`,
`shard.py`, `evaluator.py` and the channels of `exchange/`. `sizes.py` and `tensors.py` are the two things a virtual learner can
compute: nothing but time, or real gradients.
"""

from mpisgd.simulate.job import simulate

__all__ = ["simulate"]
