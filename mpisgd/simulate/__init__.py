"""Training on a virtual cluster: `simulate` runs the loops of real ranks on virtual ones, in virtual time (DESIGN 3).

`job.py` is to virtual ranks what `job/run/` is to real ones; the roles of both are built in `job/roles/`. `world.py` is what they
are built of: learners that compute nothing but time, or real gradients.
"""

from mpisgd.simulate.job import simulate

__all__ = ["simulate"]
