"""Training on a virtual cluster: `simulate` runs the loops of real ranks on virtual ones, in virtual time (DESIGN 3).

`job.py` is to virtual ranks what `job/run/` is to real ones; the roles of both are built in `job/building/`. `sizes.py` and
`tensors.py` are the two things that a virtual learner can compute: nothing but time, or real gradients.
"""

from mpisgd.simulate.job import simulate

__all__ = ["simulate"]
